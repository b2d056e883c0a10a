"""Fault drills: a real fleet, faults by a seeded schedule, and a check of the invariants that hold
under every fault.

A drill is ``ops.drill.one.drill``; the parts, in the order of its life:

    schedule  seed -> which faults, when, how long        (pure)
    fleet     the run: started, looked at, killed, started again
    faults    carries a fault out, and ends it; ``starts``, ``junk``, ``scripts`` and ``small_memory``
              have those that need more
    relay     proxies the links between workers, and damages messages
    edges     the same for one sender alone, byte by byte
    orders    faults inside a worker's process; ``shim`` puts them there
    catalogue every fault and negative control, with what is right to blame
    record    reads afterwards what happened, out of what the run cannot take back
    check     what happened -> what must not have         (pure); ``causes`` has what is done to
              workers, ``judged`` what is done with verdicts

**The history.** The ledger's server appends every effect of every transition to its file before it
answers, and a killed server reads the file back. So this file is the complete history of the run,
in order, and no checked process writes it. A drill also reads the checkpoints, none of which is
removed, and the learner's history. It reads the workers' logs, its own observations, and the
journals of the tokens that emulated generators sample."""
