"""Found orders on four processes that sleep for each block's span: is the period the planned one, and the order too?

    python -m ops.bench.pipeline --json ops/results/schedule-run.json

The exit code is 1 if a period is more than 5 % off its plan, or a step ran before one that it waits for."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any, Final

import torch
import torch.distributed as dist

from ops.bench.table import Spread, provenance, show, write_json
from ops.ending import exit_code
from pipeline.schedule.repetend import Repetend
from pipeline.schedule.search import search
from pipeline.schedule.shapes import shape
from pipeline.schedule.timetable import Step
from workers.engines.training.ranks.group import join
from workers.engines.training.ranks.launch import enter_rank, is_rank, launch
from workers.engines.training.ranks.stages.executor import OrderedExecutor, Ran

SHAPES: Final = {"V": 4, "M": 6, "K": 6}
"""Memory of each device, by shape."""
RANKS: Final = 4
BAR: Final = 0.05
"""Largest difference of a measured period from the planned one, as a share of it."""


class Sleep:
    """Sleeps as long as a block's span."""

    def __init__(self, repetend: Repetend, unit_s: float) -> None:
        self._spans = {block.name: block.span * unit_s for block in repetend.placement.blocks}

    def run(self, step: Step, inputs: Mapping[str, torch.Tensor], group: Any) -> torch.Tensor:
        time.sleep(self._spans[step.block])
        return torch.zeros(1)

    def empty(self, block: str, micro_batch: int) -> torch.Tensor:
        return torch.zeros(1)


@cache
def found(name: str) -> Repetend:
    repetend = search(shape(name, RANKS), [SHAPES[name]] * RANKS).repetend
    assert repetend is not None, "each of these is found at once"
    return repetend


def measure(folder: Path, micro_batches: int, unit_s: float, rounds: int) -> None:
    """Run each shape's order in turn, as one of the ranks; write when its steps ran."""
    group = join("cpu", timeout_s=120.0)
    ran: dict[str, list[list[Ran]]] = {name: [] for name in SHAPES}
    for _ in range(rounds):
        for name in SHAPES:
            repetend = found(name)
            executor = OrderedExecutor(
                repetend.placement, repetend.timetable(micro_batches).orders, Sleep(repetend, unit_s)
            )
            dist.barrier()
            ran[name].append(executor.run())
    rows = {name: [[(*one.step, one.begin_s, one.end_s) for one in run] for run in runs] for name, runs in ran.items()}
    (folder / f"{group.rank}.json").write_text(json.dumps(rows), encoding="utf-8")
    dist.barrier()


def judge(name: str, ran: Sequence[Sequence[Ran]], micro_batches: int, unit_s: float) -> tuple[float, bool]:
    """Return the measured period in units, and whether every step ran in its place. ``ran`` is by rank."""
    repetend = found(name)
    placement, timetable = repetend.placement, repetend.timetable(micro_batches)
    in_place = all([one.step for one in row] == list(order) for row, order in zip(ran, timetable.orders, strict=True))
    begins = {(rank, one.step): one.begin_s for rank, row in enumerate(ran) for one in row}
    ends = {(rank, one.step): one.end_s for rank, row in enumerate(ran) for one in row}
    for each in placement.dependencies:
        for micro in range(each.distance, micro_batches):
            before, after = Step(each.before, micro - each.distance), Step(each.after, micro)
            sources = placement.by_name[each.before].devices
            for rank in placement.by_name[each.after].devices:
                # its own result, or that of the first rank that has it
                source = rank if rank in sources else sources[0]
                in_place &= begins[rank, after] >= ends[source, before]
    first, last = micro_batches // 4, micro_batches * 3 // 4
    slopes = [
        (begins[block.devices[0], Step(block.name, last)] - begins[block.devices[0], Step(block.name, first)])
        for block in placement.blocks
    ]
    return median(slopes) / (last - first) / unit_s, in_place


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m ops.bench.pipeline", description="Found orders on processes that sleep."
    )
    parser.add_argument("--micro-batches", type=int, default=24, help="of a run (default: %(default)s)")
    parser.add_argument("--unit-ms", type=float, default=50.0, help="sleep of a span of 1 (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="runs of a shape (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    num, unit_s = options.micro_batches, options.unit_ms / 1000
    if is_rank():
        enter_rank()
        torch.set_num_threads(1)
        measure(options.folder, num, unit_s, options.rounds)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        words = ["--micro-batches", str(num), "--unit-ms", str(options.unit_ms), "--rounds", str(options.rounds)]
        command = [sys.executable, "-m", "ops.bench.pipeline", *words, "--folder", folder]
        if code := launch(command, RANKS, name="pipeline"):
            return code
        told = [json.loads((Path(folder) / f"{rank}.json").read_text("utf-8")) for rank in range(RANKS)]
    rows: list[dict[str, Any]] = []
    for name in SHAPES:
        judged = [
            judge(
                name,
                [[Ran(Step(row[0], row[1]), *row[2:]) for row in of_rank[name][turn]] for of_rank in told],
                num,
                unit_s,
            )
            for turn in range(options.rounds)
        ]
        planned = found(name).period
        measured = Spread.of([period for period, _ in judged])
        off = measured.median / planned - 1.0
        rows.append(
            {
                "shape": name, "planned": planned, "measured": [period for period, _ in judged], "off": off,
                "in order": all(in_place for _, in_place in judged),
            }
        )  # fmt: skip
    show(
        f"Periods of {RANKS} processes, in units of {options.unit_ms:g} ms",
        ["shape", "planned", "measured", "off by", "in order"],
        [
            (r["shape"], r["planned"], str(Spread.of(r["measured"])), f"{r['off']:+.1%}", str(r["in order"]))
            for r in rows
        ],
    )
    if options.json:
        write_json(options.json, provenance("pipeline", arguments) | {"periods": rows})
    return int(not all(abs(row["off"]) <= BAR and row["in order"] for row in rows))


if __name__ == "__main__":
    ended = exit_code(main)
    sys.stdout.flush()
    if is_rank():
        # torch's threads would be torn down while others still talk
        os._exit(ended)
    sys.exit(ended)
