"""A supervisor with fake workers as a process of its own, for tests that kill it.

python -m tests.pipeline.supervisor.supervised FOLDER [OVERRIDE ...] [--scripts ROLE=WORD ...]"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tests.pipeline.supervisor.test_supervisor import Run


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--scripts", nargs="*", default=[])
    options = parser.parse_args()
    scripts = dict(word.split("=") for word in options.scripts)
    return int(Run(options.folder, *options.overrides, **scripts).until_end().exit_code)


if __name__ == "__main__":
    sys.exit(main())
