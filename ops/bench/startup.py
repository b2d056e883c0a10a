"""How fast the command line starts: ``headrace --help`` against an interpreter that does nothing.

    python -m ops.bench.startup --json bench-results/startup.json

Prints medians of interleaved starts; the bar is half a second."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from ops.bench.table import interleaved_medians, show, write_json
from ops.ending import exit_code

BAR_S = 0.5
_CONTENDERS = {
    "python -c pass": ["-c", "pass"],
    "headrace --help": ["-m", "pipeline.cli", "--help"],
    "headrace up --help": ["-m", "pipeline.cli", "up", "--help"],
    "headrace status --help": ["-m", "pipeline.cli", "status", "--help"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args()

    def start(arguments: list[str]) -> None:
        subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL, timeout=60)

    contenders = {name: lambda a=arguments: start(a) for name, arguments in _CONTENDERS.items()}
    seconds = interleaved_medians(contenders, rounds=options.rounds)
    rows = [(name, 1000 * value, "yes" if value < BAR_S else "NO") for name, value in seconds.items()]
    show(f"Start of the command line, median of {options.rounds}", ["command", "ms", "under 0.5 s"], rows)
    if options.json:
        write_json(options.json, {"bar_s": BAR_S, "median_s": seconds})


if __name__ == "__main__":
    sys.exit(exit_code(main))
