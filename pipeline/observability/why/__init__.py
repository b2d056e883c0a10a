"""Why the run waits: from what is seen at one moment to the chain of waits and its root.

*Consumes* a ``Snapshot``: heartbeats, the ledger's view of what the next update waits for, its
queues and counters. *Produces* an ``Explanation``: chains that begin at the learner and end at a
root, what to expect, and what to do. *Waits for* nothing: pure functions, so that every answer can
be tested. ``headrace why`` takes the snapshot.

    learner <- units that are not ready <- fields that are missing   <- scorers: dead, frozen, busy, or a message that was lost
                                        <- trajectories leased, open <- generators: the same, or room in a mailbox, or weights
            <- nothing admitted         <- credit, memory, data, admission closed
            <- the critic's gate        <- the value worker <- finished responses <- units
            <- evaluation, weights that generators are to take, the ledger itself

==============  ======================================================================================================
``terms``       the snapshot and the explanation
``explain``     the learner's side: which chain begins where, and what is told first
``work``        units, their trajectories, evaluation
``workers``     the roots: a worker that is not there, frozen, stuck, waiting, or at work
``admission``   the roots when nothing is on the way: credit, memory, data, closed
``exits``       how workers' processes ended, off the supervisor's log
``silence``     an embedded ledger server that does not answer, before anything else is asked of it
==============  ======================================================================================================
"""
