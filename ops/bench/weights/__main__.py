"""Weight updates measured on this machine.

python -m ops.bench.weights --json bench-results/weights.json
python -m ops.bench.weights delta --json bench-results/weights-delta.json"""

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
from ops.bench.weights.changes import SHAPE, Change, changes
from ops.bench.weights.learner import TRANSFER_MODES, Turn, measure
from ops.ending import exit_code

SHARE_BAR = 0.5
"""Least share of memcpy's bandwidth, from publish to served on one host."""
DELTA_BAR = 10.0
"""A delta at a learning rate of 1e-6 must be this many times smaller than whole bf16 weights."""
DELTAS = (("bfloat16", 1e-6), ("bfloat16", 1e-5), ("float32", 1e-6))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m ops.bench.weights",
        description="`times`: publish to served, and the pause, against memcpy, a file's copy and gloo. `delta`: bytes of what "
        "changed at a step.",
    )
    parser.add_argument("what", nargs="?", choices=("times", "delta"), default="times")
    parser.add_argument("--rounds", type=int, default=9, help="rounds of a size and a way (default: %(default)s)")
    parser.add_argument(
        "--mb",
        default="1,16,128,1024",
        help="comma-separated sizes in MiB; 4096 needs 40 GB of memory (default: %(default)s)",
    )
    parser.add_argument(
        "--only", metavar="TEXT", help="measure only ways with this text in their name (file, wire, delta, adapter)"
    )
    parser.add_argument("--steps", type=int, default=6, help="delta: optimiser steps (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args(arguments)
    options.told = provenance("weights", arguments)
    torch.set_num_threads(1)
    if options.what == "delta":
        _deltas(options)
    else:
        _times(options)


def _times(options: argparse.Namespace) -> None:
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
        "The same bytes by other means in the same rounds: ms, median (quartiles), and medians of ratios",
        ("way", "MB", "memcpy", "file copy", "gloo", "memcpy/total", "memcpy/moving", "pause in bar"),
        [
            (
                way,
                num_bytes / 2**20,
                _spread(turns, lambda turn: turn.memcpy_s),
                _spread(turns, lambda turn: turn.file_copy_s),
                _spread(turns, lambda turn: turn.broadcast_s),
                median(turn.memcpy_s / turn.total_s for turn in turns),
                median(turn.memcpy_s / turn.moving_s for turn in turns),
                f"{sum(turn.gap_s <= turn.step_s + turn.memcpy_s for turn in turns)} of {len(turns)}",
            )
            for way, num_bytes, turns in every
        ],
    )
    print(f"Bars, on one host: memcpy/moving at least {SHARE_BAR}; the gap at most a decode step and a memcpy.")
    if options.json:
        write_json(options.json, options.told | {"results": results})


def _spread(turns: Sequence[Turn], of: Callable[[Turn], float]) -> str:
    """Format milliseconds as median (lower to upper quartile)."""
    values = sorted(1e3 * of(turn) for turn in turns)
    low, high = values[len(values) // 4], values[(3 * len(values)) // 4]
    return f"{median(values):,.1f} ({low:,.1f}-{high:,.1f})"


def _deltas(options: argparse.Namespace) -> None:
    every: list[Change] = []
    for dtype, rate in DELTAS:
        for change in changes(dtype=dtype, learning_rate=rate, num_steps=options.steps):
            every.append(change)
            print(f"{dtype}, {rate:g}, step {change.step}: {change.times_fewer:.1f} times fewer bytes", flush=True)
    show(
        f"Bytes of a delta after a real step of a model of {every[0].num_parameters:,} parameters (bar: {DELTA_BAR:g} times "
        "fewer, bf16 at 1e-6)",
        ("type", "rate", "step", "changed %", "whole MB", "delta MB", "times fewer", "make s", "apply s"),
        [
            (
                change.dtype,
                f"{change.learning_rate:g}",
                change.step,
                100 * change.changed,
                change.whole_bytes / 2**20,
                change.delta_bytes / 2**20,
                change.times_fewer,
                change.encode_s,
                change.apply_s,
            )
            for change in every
        ],
    )
    if options.json:
        figures = {"shape": asdict(SHAPE), "steps": [asdict(change) for change in every]}
        write_json(options.json, options.told | figures)


if __name__ == "__main__":
    sys.exit(exit_code(main))
