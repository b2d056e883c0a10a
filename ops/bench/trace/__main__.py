"""``python -m ops.bench.trace``: whether the analysis names the cause of a fault, on emulated fleets.

    python -m ops.bench.trace --json bench-results/trace.json

Seeds 0 to 99 are for development: the limits were chosen on them. Seeds from 1000 on are frozen, for the page
alone. Exit code 1 if a bar does not hold. On real processes ``ops.drill`` asks ``headrace why``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from math import isinf
from pathlib import Path

from ops.bench.table import Share, provenance, quantile, show, write_json
from ops.bench.trace.faults import CONTROLS, FAULTS, inject
from ops.bench.trace.model import SHAPES, EmulatedFleet
from ops.bench.trace.sampling import record
from ops.bench.trace.scoring import Answer, answer
from ops.ending import exit_code
from pipeline.process.progress_bar import tracked

FROZEN = 1000
"""First frozen seed."""
DURATION_S = 180.0
SLOWNESS = ("slow generator", "slow scorer", "slow link")
"""Faults that stop nothing, so their delay is not that of a stall."""
TOP1, TOP3, BENIGN, TRIGGER_S, NAMED_S = 0.95, 0.99, 0.02, 15.0, 2.0


def runs_of(sizes: Sequence[int], seeds: int, first: int) -> list[tuple[int, str, int]]:
    """Return size, kind and seed of every run. Fleets of 98 workers get a third of the seeds."""
    return [
        (size, kind, first + seed)
        for size in sizes
        for kind in (*FAULTS, *CONTROLS)
        for seed in range(seeds if size < 98 else max(1, seeds // 3))
    ]


def one(size: int, kind: str, seed: int) -> Answer:
    fleet = EmulatedFleet(size, 1_000_003 * seed + size + sum(map(ord, kind)))
    truth = inject(fleet, kind)
    return answer(record(fleet, DURATION_S), truth, size, seed)


def share(answers: Sequence[Answer], *, by: str) -> Share:
    return Share(sum(getattr(each, by) for each in answers), len(answers))


def seconds(value: float) -> str:
    return "missed" if isinf(value) else f"{value:.1f}"


def report(answers: Sequence[Answer]) -> bool:
    """Print the tables; return whether all bars hold."""
    faults, controls = [e for e in answers if e.is_fault], [e for e in answers if not e.is_fault]
    rows = [_row(kind, [e for e in faults if e.kind == kind]) for kind in FAULTS]
    rows += [_row(f"all, {size} workers", [e for e in faults if e.size == size]) for size in SHAPES]
    rows.append(_row("all", faults))
    columns = ("fault", "runs", "top-1", "top-3", "onset to trigger P50", "P95", "trigger to name P95")
    show("Causes", columns, [row for row in rows if row[1] != "0"])
    kinds = {kind: [e for e in controls if e.kind == kind] for kind in CONTROLS}
    blamed = [(kind, str(len(of)), str(share(of, by="has_false"))) for kind, of in kinds.items() if of]
    show(
        "Negative controls",
        ("control", "runs", "blamed"),
        [*blamed, ("all", str(len(controls)), str(share(controls, by="has_false")))],
    )
    stalls = [e for e in faults if e.kind not in SLOWNESS]
    holds = {
        f"top-1 >= {TOP1}": not share(faults, by="is_top1").share < TOP1,
        f"top-3 >= {TOP3}": not share(faults, by="is_top3").share < TOP3,
        f"blame in controls <= {BENIGN}": not share(controls, by="has_false").share > BENIGN,
        f"stall: onset to trigger P95 <= {TRIGGER_S} s": quantile([e.trigger_s for e in stalls], 0.95) <= TRIGGER_S,
        f"trigger to name P95 <= {NAMED_S} s": quantile([e.named_s for e in faults if e.named], 0.95) <= NAMED_S,
    }
    show("Bars", ("bar", "holds"), [(bar, "yes" if value else "no") for bar, value in holds.items()])
    for size in SHAPES:
        of = [e for e in answers if e.size == size]
        if of:
            mean, slowest = max(e.mean_ms for e in of), max(e.analysis_ms for e in of)
            print(f"{size} workers: a tick takes {mean:.1f} ms at most on average, {slowest:.0f} ms at worst")
    return all(holds.values())


def _row(name: str, answers: Sequence[Answer]) -> tuple[str, ...]:
    triggers, named = [e.trigger_s for e in answers], [e.named_s for e in answers if e.named_s is not None]
    middle, late = quantile(triggers, 0.5), quantile(triggers, 0.95)
    return (
        name, str(len(answers)), str(share(answers, by="is_top1")), str(share(answers, by="is_top3")), seconds(middle),
        seconds(late), seconds(quantile(named, 0.95)),
    )  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m ops.bench.trace", description="Whether the analysis names the causes of faults."
    )
    parser.add_argument(
        "--sizes", type=int, nargs="+", default=list(SHAPES), choices=list(SHAPES), help="workers of a fleet"
    )
    parser.add_argument("--seeds", type=int, default=10, help="runs of each kind; a third of them with 98 workers")
    parser.add_argument("--development", action="store_true", help="use the development seeds, from 0")
    parser.add_argument("--first", type=int, metavar="SEED", help="first seed (default: 1000; 0 with --development)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every answer here")
    given = parser.parse_args(arguments)
    first = given.first if given.first is not None else 0 if given.development else FROZEN
    runs = tracked(runs_of(given.sizes, given.seeds, first), "runs", unit="runs")
    answers = [one(size, kind, seed) for size, kind, seed in runs]
    holds = report(answers)
    if given.json is not None:
        conditions = provenance("trace", arguments, first_seed=first, seeds=given.seeds)
        write_json(given.json, conditions | {"answers": [asdict(each) for each in answers]})
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(exit_code(main))
