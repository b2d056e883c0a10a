"""A run as a timeline, for Perfetto and chrome://tracing.

``timeline`` reads what the run recorded, ``drawing`` turns it into slices and arrows on tracks, and
``trace_events`` writes the file."""
