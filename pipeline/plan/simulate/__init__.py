"""A run in simulated time: what it would do, before it costs anything.

What the run decides, its own code decides here too: ``pipeline.ledger.rules`` (admission, staleness, order of leases,
windows, groups without signal, the choice of a batch) and ``pipeline.ledger.pacing`` (when to ask). Only the work is
replaced by its costs (``pipeline.plan.costs``) and the responses by their lengths. An event is a window, a batch or
an answer, never a token, so that thousands of generators take seconds.

    clock       simulated time, the door to simpy
    ledger      the rules, with what a response is here, and the time of the ledger's server
    generators  slots, leases, windows, weights
    scorers     mailboxes and batches of reward, reference and value
    learner     claims, steps, publications, checkpoints
    run         all of them together
    inputs      costs and lengths from files, a run or an engine
    prediction  what comes out
    drawing     a picture of it

Not simulated: failures, evaluations, environments of several turns, and the critic's own steps."""
