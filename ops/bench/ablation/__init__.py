"""The papers' tables in small: variants of one configuration, trained in one process on a counter
task, and compared.

``tables`` lists the variants, ``runs`` trains one with one seed, ``summary`` makes means and
intervals, ``page`` writes them down. ``python -m ops.bench.ablation --help``."""
