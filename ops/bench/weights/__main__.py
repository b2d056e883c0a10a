"""Weight updates measured on this machine.

python -m ops.bench.weights --json bench-results/weights.json"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median

import torch

from ops.bench.table import provenance, show, write_json
from ops.bench.weights.learner import TRANSFER_MODES, Turn, measure
from ops.ending import exit_code

SHARE_BAR = 0.5
"""Least share of memcpy's bandwidth, from publish to served on one host."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m ops.bench.weights",
        description="From publish to served, and the pause, against memcpy.",
    )
    parser.add_argument("--rounds", type=int, default=9, help="rounds of a size and a way (default: %(default)s)")
    parser.add_argument(
        "--mb",
        default="1,16,128,1024",
        help="comma-separated sizes in MiB; 4096 needs 40 GB of memory (default: %(default)s)",
    )
    parser.add_argument(
        "--only", metavar="TEXT", help="measure only ways with this text in their name (file, wire, delta, adapter)"
    )
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    results: dict[str, object] = {}
    every: list[tuple[str, int, list[Turn]]] = []
    for megabytes in map(int, options.mb.split(",")):
        for way in TRANSFER_MODES:
            if options.only and options.only not in way.name:
                continue
            folder = Path(tempfile.mkdtemp(prefix="headrace-bench-"))
            try:
                num_bytes, turns = measure(way, megabytes << 20, rounds=options.rounds, folder=folder)
            finally:
                shutil.rmtree(folder, ignore_errors=True)
            every.append((way.name, num_bytes, turns))
            results[f"{way.name}, {megabytes} MB"] = {"num_bytes": num_bytes, "turns": [asdict(turn) for turn in turns]}
            print(f"{way.name}, {megabytes} MB: {_spread(turns, lambda turn: turn.total_s)} ms", flush=True)
    show(
        "From publish to served during decoding: ms, median (quartiles)",
        ("way", "MB", "moved MB", "total", "write", "verify", "gap", "step"),
        [
            (
                way,
                num_bytes / 2**20,
                median(turn.num_bytes for turn in turns) / 2**20,
                _spread(turns, lambda turn: turn.total_s),
                _spread(turns, lambda turn: turn.write_s),
                _spread(turns, lambda turn: turn.verify_s),
                _spread(turns, lambda turn: turn.gap_s),
                _spread(turns, lambda turn: turn.step_s),
            )
            for way, num_bytes, turns in every
        ],
    )
    show(
        "A memcpy of the same bytes in the same rounds: ms, median (quartiles), and medians of ratios",
        ("way", "MB", "memcpy", "memcpy/total", "memcpy/moving", "pause in bar"),
        [
            (
                way,
                num_bytes / 2**20,
                _spread(turns, lambda turn: turn.memcpy_s),
                median(turn.memcpy_s / turn.total_s for turn in turns),
                median(turn.memcpy_s / turn.moving_s for turn in turns),
                f"{sum(turn.gap_s <= turn.step_s + turn.memcpy_s for turn in turns)} of {len(turns)}",
            )
            for way, num_bytes, turns in every
        ],
    )
    print(f"Bars, on one host: memcpy/moving at least {SHARE_BAR}; the gap at most a decode step and a memcpy.")
    if options.json:
        write_json(options.json, provenance("weights", arguments) | {"results": results})


def _spread(turns: Sequence[Turn], of: Callable[[Turn], float]) -> str:
    """Format milliseconds as median (lower to upper quartile)."""
    values = sorted(1e3 * of(turn) for turn in turns)
    low, high = values[len(values) // 4], values[(3 * len(values)) // 4]
    return f"{median(values):,.1f} ({low:,.1f}-{high:,.1f})"


if __name__ == "__main__":
    sys.exit(exit_code(main))
