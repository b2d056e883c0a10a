"""Faults that one worker shows by itself: its own reports, failures, refusals, replacements, and stalls."""
