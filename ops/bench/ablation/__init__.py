"""The papers' tables in small: variants of one configuration, trained for real on the counter task,
and compared.

``tables`` lists the variants, ``runs`` trains one with one seed, ``accuracy`` evaluates the weights
that it published. ``summary`` makes means and intervals, ``page`` writes them down.
``python -m ops.bench.ablation --help``."""
