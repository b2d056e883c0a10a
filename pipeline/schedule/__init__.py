"""Orders of pipeline work: which block each device runs next, found by search and judged apart from it.

``shapes`` and ``files`` make a placement, ``search`` finds the shortest period that repeats, ``baselines`` are the
orders that people know, ``timetable`` checks and measures any of them. Nothing here imports torch or talks to a run."""
