"""The fleet as its heartbeats show it, and what is to be done about it.

    state, limits, health    one reading of the heartbeats, one table of limits, one verdict on a worker
    status                   a row for each worker, for commands and views
    peers                    which worker differs from others of its role
    flow                     who waits for whom, and where progress stops
    signs                    faults that a worker shows by itself
    suspicions, incidents    all of these joined by worker, and what became of them
    repair                   which step comes next for a suspect, and its budgets
    why                      why a run makes no progress, in words

Nothing here starts a process, and only ``why.silence`` asks a server itself. The observer feeds
``suspicions``, the supervisor acts on ``health`` and ``repair``, and commands read ``status`` and
``why``."""
