"""Find the faulty worker in synthetic fleets of 8 to 10,000 workers: the watch's gate.

    python -m ops.bench.watch --seeds dev --sizes 8,32 --windows 26 --json bench-results/watch.json
    python -m ops.bench.watch --calibrate --sizes 32 --windows 30

Half of the windows have a fault and half have none; half of the latter are negative controls. A fifth as many
more have two or three faults. The test seeds are for the final figures alone. Exit code 1 if a bar does not
hold."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from ops.bench.table import provenance, quantile, show, write_json
from ops.bench.watch.cases import CONCURRENT, EXPLICIT_S, SPLITS, WINDOW_S, Case, cases
from ops.bench.watch.fleet import SyntheticFleet
from ops.bench.watch.scoring import Alarm, Outcome, is_decided, judge, summarise
from ops.ending import exit_code
from pipeline.fleet.peers.offline import fitted, largest_strengths
from pipeline.fleet.peers.thresholds import SHIPPED, Thresholds, merged, read_thresholds
from pipeline.fleet.peers.watcher import Watch
from pipeline.process.progress_bar import tracked

SIZES = (8, 32, 128, 512, 1024, 4096, 10_000)
F1, F1_LARGEST, F1_CONCURRENT, BLAMED, GRAY_P90_S = 0.96, 0.90, 0.85, 0.02, 120.0
"""The bars; the second is for 10,000 workers."""


def planned(split: str, size: int, windows: int, first: int = 0) -> list[Case]:
    """Return the windows of one size: ``windows`` with one fault, as many benign, and a fifth as many with several
    faults."""
    half = windows // 2
    shares = {"single": windows, "concurrent": windows // 5, "benign": windows - half, "controls": half}
    return list(cases(split, size, **shares, first=first))


def run_case(case: Case) -> Outcome:
    """Run the watch on a window and judge its alarms."""
    fleet, watch = SyntheticFleet(case), Watch()
    alarms: list[Alarm] = []
    for second, frame in enumerate(fleet.frames()):
        now = float(second)
        alarms += [Alarm(now, found.worker, found.kind, found.metric) for found in watch.tick(frame)]
        if is_decided(fleet.truth, alarms, now):
            break
    return judge(case, fleet.truth, alarms)


def bars(outcomes: Sequence[Outcome], size: int) -> dict[str, bool]:
    """Return whether each bar holds for the windows of one size. A bar without windows holds."""
    own = [outcome for outcome in outcomes if outcome.size == size]
    total = summarise([outcome for outcome in own if outcome.label != CONCURRENT])
    several = summarise([outcome for outcome in own if outcome.label == CONCURRENT])
    gray = [
        delay
        for outcome in own
        for delay, limit in zip(outcome.delays_s, outcome.limits_s, strict=True)
        if limit > EXPLICIT_S and outcome.label != CONCURRENT
    ]
    least = F1_LARGEST if size >= max(SIZES) else F1
    return {
        f"F1 at least {least}": not total.f1.share < least,
        f"F1 of several at least {F1_CONCURRENT}": not several.f1.share < F1_CONCURRENT,
        f"blame at most {BLAMED:.0%}": not total.blamed.share > BLAMED,
        f"gray P90 at most {GRAY_P90_S:g} s": not gray or quantile(gray, 0.9) <= GRAY_P90_S,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return 1 if a bar does not hold."""
    chosen = _parsed(arguments)
    if chosen.calibrate:
        for size in chosen.sizes:
            _calibrate(size, chosen.windows, chosen.first)
        return 0
    outcomes: list[Outcome] = []
    for size in chosen.sizes:
        plan = planned(chosen.seeds, size, chosen.windows, chosen.first)
        outcomes += [run_case(case) for case in tracked(plan, f"{size} workers", "windows")]
    holds = _report(outcomes)
    if chosen.json:
        told = provenance("watch", arguments, seeds=chosen.seeds, windows=chosen.windows, sizes=chosen.sizes)
        write_json(chosen.json, told | {"outcomes": [asdict(outcome) for outcome in outcomes]})
    return int(not holds)


def _report(outcomes: Sequence[Outcome]) -> bool:
    sizes = sorted({outcome.size for outcome in outcomes})
    rows = []
    for size in sizes:
        own = [one for one in outcomes if one.size == size and one.label != CONCURRENT]
        total = summarise(own)
        delays = "/".join("missed" if math.isinf(delay) else f"{delay:.0f}" for delay in total.delay_s)
        f1 = f"{total.f1.share:.3f}"
        rows.append((size, total.windows, str(total.precision), str(total.recall), f1, str(total.blamed), delays))
    columns = ("workers", "windows", "precision", "recall", "F1", "blamed", "delay P50/P90/P99, s")
    show("One fault or none", columns, rows)
    for outcome in outcomes:
        if outcome.num_wrong or outcome.num_found < len(outcome.kinds):
            print(f"{outcome.size} workers, {outcome.label} {outcome.index}: {outcome.delays_s} {outcome.first}")
    missed = [f"{size} workers: {bar}" for size in sizes for bar, holds in bars(outcomes, size).items() if not holds]
    print("\n".join(f"DOES NOT HOLD, {bar}" for bar in missed) or "all bars hold")
    return not missed


def _calibrate(size: int, windows: int, first: int) -> None:
    """Fit the shipped thresholds of one size on development windows."""
    half = windows // 2
    benign = list(cases("dev", size, single=0, concurrent=0, benign=windows - half, controls=half, first=first))
    found = [
        largest_strengths(SyntheticFleet(case).frames(), WINDOW_S - 1.0)
        for case in tracked(benign, f"{size} workers", "windows")
    ]
    tail = fitted(found)
    merged([read_thresholds(SHIPPED), Thresholds({size: tail})]).write(SHIPPED)
    print(f"watch at {size}: {tail}, limits times {tail.strength(size):.2f}, from {len(found)} windows", flush=True)


def _parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    def numbers(text: str) -> tuple[int, ...]:
        return tuple(int(part) for part in text.split(","))

    parser = argparse.ArgumentParser(
        prog="python -m ops.bench.watch", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", type=numbers, default=SIZES, help="workers of the fleets")
    parser.add_argument("--windows", type=int, default=52, help="windows of a size with one fault; as many are benign")
    parser.add_argument("--seeds", choices=SPLITS, default="dev")
    parser.add_argument(
        "--first", type=int, default=0, help="number of each kind's first window; other numbers mean other seeds"
    )
    parser.add_argument("--json", type=Path, help="write every window's outcome here")
    parser.add_argument("--calibrate", action="store_true", help="fit the shipped thresholds on the development seeds")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(exit_code(main))
