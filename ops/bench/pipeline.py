"""Programs of found orders on four processes that sleep for each block's span: is the period the planned one, and the
order too?

    python -m ops.bench.pipeline --json ops/results/schedule-run.json

The exit code is 1 if a period is more than 5 % off its plan, or a step ran before one that it waits for."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple, cast

import msgspec
import torch
import torch.distributed as dist

from ops.bench.table import Spread, provenance, show, write_json
from ops.ending import exit_code
from pipeline.plan.programs.actions import Given, Program
from pipeline.plan.programs.check import check_program
from pipeline.plan.programs.operators import Model, Operator
from pipeline.plan.programs.placing import Stage, backward_of, place
from pipeline.plan.programs.preserve import preserve
from pipeline.plan.programs.split import Split, transform
from pipeline.schedule.blocks import Placement
from pipeline.schedule.repetend import Repetend
from pipeline.schedule.search import search
from pipeline.schedule.shapes import shape
from pipeline.schedule.timetable import Orders, Step
from workers.engines.training.ranks.group import join
from workers.engines.training.ranks.launch import enter_rank, is_rank, launch
from workers.engines.training.ranks.program import Function, ProgramRunner

SHAPES: Final = {"V": 4, "M": 6, "K": 6}
"""Memory of each device, by shape."""
RANKS: Final = 4
BAR: Final = 0.05
"""Largest difference of a measured period from the planned one, as a share of it."""


class Ran(NamedTuple):
    """When a step ran on a rank, on the host's monotonic clock."""

    block: str
    micro_batch: int
    begin_s: float
    end_s: float

    @property
    def step(self) -> Step:
        return Step(self.block, self.micro_batch)


class Sleeper:
    """Computes the blocks of a placement by sleeping as long as their spans, and notes when."""

    def __init__(self, placement: Placement, unit_s: float) -> None:
        self._spans = {block.name: block.span * unit_s for block in placement.blocks}
        self.ran = list[Ran]()

    def sleep(self, block: str, micro_batch: int) -> None:
        begin_s = time.monotonic()
        time.sleep(self._spans[block])
        self.ran.append(Ran(block, micro_batch, begin_s, time.monotonic()))

    def functions(self, model: Model) -> dict[str, Function]:
        """Return what computes each operator."""

        def function(operator: Operator) -> Function:
            shape = model.shapes[operator.output]
            return lambda _, number, *inputs: cast(
                "torch.Tensor", _Asleep.apply(self, operator.name, shape, number, *inputs)
            )

        return {each.kind: function(each) for each in model.operators}


class _Asleep(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, sleeper: Sleeper, block: str, shape: tuple[int, ...], number: torch.Tensor, *inputs: torch.Tensor
    ) -> torch.Tensor:
        ctx.backward_pass = sleeper, backward_of(block), int(number)
        ctx.num_inputs = len(inputs)
        sleeper.sleep(block, int(number))
        return torch.zeros(shape)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        sleeper, block, micro_batch = ctx.backward_pass
        sleeper.sleep(block, micro_batch)
        return (None, None, None, None, *(torch.zeros(1) for _ in range(ctx.num_inputs)))


def program_of(placement: Placement, orders: Orders) -> tuple[Model, Program]:
    """Return the blocks as operators, each with one number for a weight; those of several devices are on all of them."""
    in_order = [placement.blocks[place] for place in placement.order]
    forward = [block for block in in_order if block.name.rpartition(".")[2].startswith("f")]
    shapes: dict[str, tuple[int, ...]] = {"number": ()}
    operators = list[Operator]()
    for block in forward:
        before = [d.before for d in placement.dependencies if d.after == block.name]
        inputs = ("number", f"{block.name} weight", *(f"{name} out" for name in before))
        is_last = block is forward[-1]
        rule = f",{','.join(f' {chr(97 + place)}^' for place in range(len(before) + 1))} -> {'' if is_last else 'z'}"
        operators.append(Operator(block.name, block.name, rule, inputs, f"{block.name} out"))
        shapes |= {f"{block.name} weight": (1,), f"{block.name} out": () if is_last else (1,)}
    weights = tuple(f"{block.name} weight" for block in forward)
    model = Model(shapes, weights, ("number",), tuple(operators), operators[-1].output).check()
    splits = {block.name: Split(copies=len(block.devices)) for block in forward}
    stages = {block.name: Stage((block.name,), block.devices) for block in forward}
    program = preserve(place(model, transform(model, splits), stages, placement, orders))
    check_program(model, program)
    return model, program


@cache
def found(name: str) -> Repetend:
    repetend = search(shape(name, RANKS), [SHAPES[name]] * RANKS).repetend
    assert repetend is not None, "each of these is found at once"
    return repetend


def measure(folder: Path, micro_batches: int, unit_s: float, rounds: int) -> None:
    """Run each shape's program in turn, as one of the ranks; write when its steps ran."""
    group = join("cpu", timeout_s=120.0)
    ran: dict[str, list[list[Ran]]] = {name: [] for name in SHAPES}
    for _ in range(rounds):
        for name in SHAPES:
            placement = found(name).placement
            told = None
            if group.is_lead:
                told = msgspec.json.encode(program_of(placement, found(name).timetable(micro_batches).orders))
            model, program = msgspec.json.decode(group.broadcast_bytes(told).tobytes(), type=tuple[Model, Program])
            sleeper = Sleeper(placement, unit_s)
            runner = ProgramRunner(sleeper.functions(model), group)
            dist.barrier()
            runner.run(
                model,
                program,
                lambda given: torch.tensor(given.micro_batch) if given.micro_batch >= 0 else torch.zeros(1),
            )
            ran[name].append(sleeper.ran)
    (folder / f"{group.rank}.json").write_bytes(msgspec.json.encode(ran))
    dist.barrier()


def _given(each: Given) -> torch.Tensor:
    return torch.zeros(1) if each.micro_batch < 0 else torch.tensor(each.micro_batch)


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
        files = [(Path(folder) / f"{rank}.json").read_bytes() for rank in range(RANKS)]
        told = [msgspec.json.decode(each, type=dict[str, list[list[Ran]]]) for each in files]
    rows: list[dict[str, Any]] = []
    for name in SHAPES:
        judged = [judge(name, [of_rank[name][turn] for of_rank in told], num, unit_s) for turn in range(options.rounds)]
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
