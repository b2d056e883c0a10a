"""``python -P -m headrace MODULE ARGUMENT ...``: the same as running protocol/headrace.py."""

from __future__ import annotations

import sys

from headrace import run

# not again in processes that multiprocessing spawns
if __name__ == "__main__":
    run(sys.argv[1:])
