"""``python -P -m headrace MODULE ARGUMENT ...``: as protocol/headrace.py, by hand."""

from __future__ import annotations

import sys

from headrace import run

# not for what multiprocessing spawns from here
if __name__ == "__main__":
    run(sys.argv[1:])
