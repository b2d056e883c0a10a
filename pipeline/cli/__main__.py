"""``python -m pipeline.cli``: the same as ``headrace``."""

from pipeline.cli import main

main()
