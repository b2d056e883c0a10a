"""Searches for pipeline schedules: periods with proofs, seconds of one thread, and makespans beside known orders.

    python -m ops.bench schedule --rounds 3 --json ops/results/schedule.json

Instances take turns within a round, those of the memory grid and unrolled ones once; seconds are the process's own.
Known orders are played by the simulator, and every found one passes the judge."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

from ops.bench.table import provenance, show, write_json
from pipeline.process.progress_bar import tracked
from pipeline.schedule.baselines import ONE_AT_A_TIME, known_orders, measured_period
from pipeline.schedule.iteration import plan_iteration
from pipeline.schedule.plan import least_makespan
from pipeline.schedule.play import play
from pipeline.schedule.search import Found, search
from pipeline.schedule.shapes import Costs, shape
from protocol.errors import ConfigError

MAIN: Final = {"V": 4, "X": 4, "M": 6, "NN": 6, "MLLM": 6, "K": 6, "NN-eager": 6, "finetune": 6, "3F1B": 8}
"""Memory on four devices; on eight twice as much, of V four times a device's."""
UNROLLED: Final = (("V", 3, 3), ("V", 2, 2), ("M", 3, 2), ("M", 3, 3), ("NN", 5, 2), ("MLLM", 4, 2), ("K", 2, 2))
"""Shape, memory, micro-batches that may repeat together."""
WHOLE: Final = Costs()
_SPLIT: Final = {"1, 1, 1": Costs(1, 2, 1, 2, 1, True), "2, 3, 2": Costs(2, 5, 2, 2, 1, True)}
"""Spans of forward pass and gradients for inputs and weights; both gradients give back half of the memory."""
NUM: Final = 128
ONCE: Final = ("grid", "unrolled")
"""Groups that only the first round has."""


@dataclass(frozen=True)
class Case:
    """One search."""

    group: str
    shape: str
    devices: int
    memory: tuple[int, ...]
    unroll: int = 1
    costs: Costs = WHOLE
    limit_s: float = 45.0

    @property
    def name(self) -> str:
        limit = str(self.memory[0]) if len(set(self.memory)) == 1 else " ".join(map(str, self.memory))
        unrolled = f" x {self.unroll}" if self.unroll > 1 else ""
        return f"{self.group}: {self.shape} on {self.devices}, memory {limit}{unrolled}"

    def run(self) -> Found:
        return search(
            shape(self.shape, self.devices, self.costs), self.memory, unroll=self.unroll, time_limit_s=self.limit_s
        )


def cases() -> Iterator[Case]:
    for name, memory in MAIN.items():
        yield Case("four", name, 4, (memory,) * 4)
        yield Case("eight", name, 8, (8 if name == "V" else 2 * memory,) * 8)
    for name in ("V", "X", "M", "NN", "K"):
        yield Case("inference", name, 4, (4,) * 4, costs=Costs(training=False))
        for memory in range(1, 17):
            yield Case("grid", name, 4, (memory,) * 4)
    for name, memory, unroll in UNROLLED:
        yield Case("unrolled", name, 4, (memory,) * 4, unroll=unroll)


def searched(case: Case) -> dict[str, Any]:
    """Return what a case's search found; a period of None: no order keeps the memory."""
    began_s = time.process_time()
    try:
        found = case.run()
    except ConfigError as error:
        return {"period": None, "refused": str(error), "seconds": time.process_time() - began_s}
    seconds, repetend = time.process_time() - began_s, found.repetend
    assert repetend is not None
    repetend.timetable(NUM).check(case.memory)
    return {
        "period": float(repetend.period / repetend.unroll),
        "period_bound": float(found.period_bound),
        "period_proof": found.period_proof,
        "latency": repetend.latency,
        "latency_proof": found.latency_proof,
        "seconds": seconds,
        "solves": found.num_solves,
    }


def beside_known_orders(name: str, devices: int, memory: int, costs: Costs) -> dict[str, Any]:
    """Return makespans of 128 micro-batches (of X 64 pairs): ours, the least possible, and of the known orders."""
    placement, num = shape(name, devices, costs), NUM // 2 if name == "X" else NUM
    found = search(placement, [memory] * devices)
    assert found.repetend is not None
    ours = found.repetend.timetable(num).makespan
    known = {key: play(placement, order(num)) for key, order in known_orders(placement).items()}
    rows = {key: {"makespan": t.makespan, "peaks": t.peaks, "fits": max(t.peaks) <= memory} for key, t in known.items()}
    return {"num": num, "makespan": ours, "bound": least_makespan(placement, num), "known": rows}


def beside_zero_bubble(devices: int) -> Iterator[dict[str, Any]]:
    """Yield periods of the split backward pass: of each known order, and found within its peaks and within less."""
    for spans, costs in _SPLIT.items():
        for name in ("V", "wave"):
            placement = shape(name, devices, costs)
            for key, order in known_orders(placement).items():
                if key in (ONE_AT_A_TIME, "GPipe"):
                    continue
                theirs = play(placement, order(4 * devices))
                row = {"spans": spans, "shape": name, "devices": devices, "order": key, "peaks": theirs.peaks}
                period = float(measured_period(placement, order))
                found = searched(Case("split", name, devices, theirs.peaks, costs=costs))
                assert found["period"] is not None
                yield {**row, "their period": period, "their makespan": theirs.makespan, **found}
            held = 2 * len(placement.on_device[0]) // 3 * devices
            for memory in (held * 3 // 4, held // 2):
                found = searched(Case("split", name, devices, (memory,) * devices, unroll=2, costs=costs, limit_s=30.0))
                fitting = [
                    float(measured_period(placement, order))
                    for order in known_orders(placement).values()
                    if max(play(placement, order(4 * devices)).peaks) <= memory
                ]
                row = {
                    "spans": spans,
                    "shape": name,
                    "devices": devices,
                    "order": "the best that fits",
                    "peaks": (memory,),
                }
                yield {**row, "their period": min(fitting), **found}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m ops.bench.schedule", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = dict[str, dict[str, Any]]()
    for number in range(options.rounds):
        listed = [case for case in cases() if not number or case.group not in ONCE]
        for case in tracked(listed, f"round {number + 1}", "searches"):
            row, before = searched(case), rows.get(case.name, {"seconds": []})
            rows[case.name] = {**row, "seconds": [*before["seconds"], row["seconds"]]}
    columns = ("instance", "period", "proof", "latency", "seconds, median")
    show("Searches", columns, [
        (name, row["period"] or "-", row.get("period_proof", "impossible"), row.get("latency", "-"), median(row["seconds"]))
        for name, row in rows.items()
    ])  # fmt: skip
    quality = {name: beside_known_orders(name, 4, memory, Costs()) for name, memory in MAIN.items()}
    show(f"{NUM} micro-batches", ("shape", "found", "bound", "known orders"), [
        (name, row["makespan"], row["bound"], ", ".join(f"{key} {each['makespan']}" for key, each in row["known"].items()))
        for name, row in quality.items()
    ])  # fmt: skip
    split = [row for devices in (4, 8) for row in beside_zero_bubble(devices)]
    show("Split backward pass", ("spans", "shape", "known order", "its peak", "its period", "found", "proof"), [
        (row["spans"], f"{row['shape']} on {row['devices']}", row["order"], max(row["peaks"]), row["their period"],
         row["period"], row["period_proof"])
        for row in split
    ])  # fmt: skip
    plans = plan_iteration(Path("configs/schedules/iteration.json"), chunks=4)
    iteration = {plan.staleness: plan.period.value for plan in plans}
    show("RL iteration, 4 chunks", ("staleness", "period"), list(iteration.items()))
    if options.json:
        results = {"searches": rows, "makespans": quality, "split": split, "iteration": iteration}
        write_json(options.json, {**provenance("schedule", None, rounds=options.rounds), **results})


if __name__ == "__main__":
    main()
