"""Measure fleets of several sizes and print one table.

    python -m ops.bench.overhead --json bench-results/overhead.json

*Consumes* nothing but this project. *Produces* a table, JSON, and exit code 1 when a bar does not
hold. *Waits for* the runs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from ops.bench.overhead.fleet import Cost, measure
from ops.bench.overhead.parts import PARTS
from ops.bench.table import Spread, provenance, show, write_json
from ops.ending import exit_code
from pipeline.process.progress_bar import tracked

SIZES = (2, 8, 24, 60)
"""Generators; with the reward, reference and learner processes the largest fleet has 63 workers."""
BAR = 0.05
"""Of one core, for each emulated device of 2,000 tokens a second."""
LINEAR = 1.25
"""Allowed cost of a token in the largest fleet, over its cost in the smallest."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write; return 1 when a bar does not hold."""
    parser = argparse.ArgumentParser(
        prog="headrace bench overhead",
        description="Processor seconds of the control plane a million tokens, by part, with emulated devices.",
    )
    parser.add_argument("--generators", type=int, action="append", help=f"of a fleet (default: {SIZES})")
    parser.add_argument("--updates", type=int, default=6, help="that are measured (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=1, help="(default: %(default)s)")
    parser.add_argument("--work", type=Path, default=Path("bench-results/overhead"), help="runs (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="write the figures here, too")
    options = parser.parse_args(arguments)
    sizes = options.generators or list(SIZES)
    costs: dict[int, list[Cost]] = {size: [] for size in sizes}
    for _ in tracked(range(options.rounds), "overhead", "rounds"):
        for size in sizes:
            costs[size].append(measure(size, options.work, num_updates=options.updates))
            print(f"{size} generators: {costs[size][-1].core_share:.2%} of a core for each", flush=True)
    show(
        "Control plane: CPU seconds a million tokens",
        ("part", *(f"{size} generators" for size in sizes)),
        [
            *(
                (part, *(Spread.of([cost.per_million[part] for cost in costs[size]]).median for size in sizes))
                for part in PARTS
            ),
            ("sum", *(_sum(costs[size]) for size in sizes)),
            ("share of a core a device, %", *(100 * _share(costs[size]) for size in sizes)),
            ("  at the pace reached, %", *(100 * _middle([c.measured_share for c in costs[size]]) for size in sizes)),
            ("  that pace, tokens/s", *(_middle([c.pace for c in costs[size]]) for size in sizes)),
        ],
    )
    growth = _sum(costs[max(sizes)]) / _sum(costs[min(sizes)])
    holds = {"share": max(_share(of) for of in costs.values()) < BAR, "linear": growth <= LINEAR}
    print(f"under {BAR:.0%} of a core a device: {'holds' if holds['share'] else 'DOES NOT HOLD'}")
    print(
        f"linear (a token costs {growth:.2f} times the smallest fleet's): {'holds' if holds['linear'] else 'DOES NOT HOLD'}"
    )
    if options.json:
        told = provenance("overhead", arguments, updates=options.updates, rounds=options.rounds, seed=0)
        fleets = [
            asdict(cost) | {"core_share": cost.core_share, "measured_share": cost.measured_share, "pace": cost.pace}
            for of in costs.values()
            for cost in of
        ]
        write_json(options.json, told | {"bar": BAR, "growth": growth, "fleets": fleets})
    return int(not all(holds.values()))


def _sum(costs: Sequence[Cost]) -> float:
    return Spread.of([sum(cost.per_million.values()) for cost in costs]).median


def _middle(values: Sequence[float]) -> float:
    return Spread.of(values).median


def _share(costs: Sequence[Cost]) -> float:
    return Spread.of([cost.core_share for cost in costs]).median


if __name__ == "__main__":
    sys.exit(exit_code(main))
