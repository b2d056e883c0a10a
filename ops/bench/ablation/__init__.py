"""The papers' tables in small: variants of one configuration, trained in one process on a counter task.

``tables`` lists the variants, ``runs`` trains one of them with one seed, ``summary`` computes means and
intervals, ``page`` writes them down. ``python -m ops.bench.ablation --help``."""
