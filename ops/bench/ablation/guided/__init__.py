"""The table of learning from guidance: NLFT, its first-error form and their baselines on few
responses, in one process.

``rows`` lists what is compared. ``guides`` makes the guided columns. ``learner`` learns with the
project's engines and rules. ``runs`` keeps an outcome of each run. ``flags`` counts what the rules
flag. ``table`` runs them all, and ``page`` has the result. ``python -m ops.bench.ablation --help``."""
