"""Start a run under the supervisor: a thin way into ``headrace up`` for process managers that want
a script.

python ops/supervise.py configs/demo.toml --fleet configs/fleets/demo.toml"""

from __future__ import annotations

import sys

from pipeline.cli import main

if __name__ == "__main__":
    main(["up", *sys.argv[1:]])
