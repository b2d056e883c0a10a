"""Fault drills: a real fleet, faults by a seeded schedule, and a check of what must hold whatever
happens.

A drill is ``ops.drill.one.drill``; the parts, in the order of its life:

    schedule  seed -> which faults, when, how long        (pure)
    fleet     the run: started, looked at, killed, started again
    faults    carries a fault out, and ends it
    relay     stands on the links between workers, and damages what passes
    record    reads afterwards what happened, out of what the run cannot take back
    check     what happened -> what must not have         (pure)

**The history.** The ledger's server appends every effect of every transition to its file before
anybody hears of it, and a killed server reads it back. So this file is the history of the run, in
order and complete, written by nobody who is checked. Beside it: the checkpoints (none is removed in
a drill), the learner's history, the journals in which emulated generators write down what they
sample, the workers' logs, and what the drill saw itself.
"""
