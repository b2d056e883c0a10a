"""Why the run waits: from a snapshot of one moment to chains of waits and their roots.

``headrace why`` takes a ``Snapshot``: heartbeats, the ledger's view of the next update, queues and
counters. ``explain`` makes an ``Explanation`` of it. A chain begins at the learner and ends at a
root, with an outlook and the next step. Which worker waits for which is the wait-for graph of
``pipeline.flow``. All functions are pure, but for ``exits`` and ``silence``.

    learner <- units not ready  <- fields missing  <- scorers: dead, frozen, busy; a lost message
                                <- trajectories    <- generators: the same; room in a mailbox; weights
            <- nothing admitted <- credit, memory, data, admission closed
            <- the critic's gate <- the value worker <- finished responses <- units
            <- evaluation, weights that generators take, the ledger itself"""
