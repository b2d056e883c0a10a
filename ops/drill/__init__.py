"""Fault drills: a real fleet, faults by a seeded schedule, and a check of the invariants that hold under every
fault.

A drill is ``ops.drill.one.drill``. Its parts, in the order of its life:

    schedule   seed -> which faults, when, how long        (pure)
    fleet      the run: started, inspected, killed, started again
    faults     carries a fault out, and ends it; ``starts``, ``junk``, ``scripts``, ``nowhere`` and
               ``small_memory`` have those that need more
    relay      proxies the links to mailboxes, and damages messages
    orders     faults inside a worker's process; ``shim`` puts them there
    truth      asks ``headrace why`` for the cause
    witness    observes the live run; ``record`` reads afterwards what happened, from what the run cannot take back
    check      what happened -> what must not have         (pure); ``causes`` has what is done to workers,
               ``judged`` what is done with verdicts

**The history.** The ledger's server appends every effect of every transition to its file before it answers, and
a killed server reads the file back. So this file is the complete history of the run, in order, and no checked
process writes it. A drill also reads the checkpoints, none of which is removed, the learner's history, the
workers' logs, its own observations, and the journals of the tokens that emulated generators sample."""
