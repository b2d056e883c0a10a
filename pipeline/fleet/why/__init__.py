"""Why a run waits: from a snapshot of one moment to chains of waits and their root causes.

``headrace why`` passes a ``Snapshot`` (heartbeats, the ledger's view of the next update, queues and
counters) to ``explain``, which returns an ``Explanation``. A chain begins at the learner and ends at a root
cause, with an outlook and the next step. Who waits for whom is the wait-for graph of ``pipeline.fleet.flow``. Only
``silence`` does I/O.

    learner <- units not ready  <- fields missing  <- scorers: dead, frozen, busy; a lost message
                                <- trajectories    <- generators: the same; room in a mailbox; weights
            <- nothing admitted <- credit, memory, data, admission closed
            <- the critic's gate <- the value worker <- finished responses <- units
            <- evaluation, weights that generators take, the ledger itself"""
