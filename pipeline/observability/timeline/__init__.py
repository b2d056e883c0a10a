"""A run as a picture in time, for Perfetto and chrome://tracing.

``timeline`` reads what the run has recorded, ``trace_events`` writes the file. ``lanes`` and
``waits`` put stretches on tracks on which nothing overlaps."""
