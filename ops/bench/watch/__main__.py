"""Find the faulty worker in synthetic fleets of 8 to 10,000 workers, with the watch and baselines.

    headrace bench watch --seeds dev --sizes 8,32 --windows 26 --json bench-results/watch.json
    headrace bench watch --seeds test --minutes 4 --json bench-results/watch.json --page watch.md

Half of the windows have a fault, half have none; half of the latter are negative controls. A fifth
as many more have two or three faults. The test seeds are for the final figures alone.

*Consumes* two generators of fleets, and the frozen thresholds of the baselines. *Produces* tables,
JSON with the outcome of every window, and a page. *Waits for* nothing."""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ops.bench.table import provenance
from ops.bench.watch.cases import SPLITS, WINDOW_S, Case, cases, in_turn
from ops.bench.watch.contenders import (
    NAMES,
    THRESHOLDS,
    TUNED,
    check_distinct,
    check_windows_distinct,
    make_all,
    read_thresholds,
    threshold,
)
from ops.bench.watch.evaluation import highest_levels, run_cases, tick_costs
from ops.bench.watch.fleets import open_fleet
from ops.bench.watch.page import page, print_summary
from ops.bench.watch.raw import read_raw, write_raw
from ops.bench.watch.scoring import Outcome
from ops.ending import exit_code
from pipeline.watch import watcher
from pipeline.watch.calibration import fitted, largest_strengths
from pipeline.watch.thresholds import SHIPPED, Thresholds, merged
from pipeline.watch.thresholds import read_thresholds as read_watch_thresholds

SIZES = (8, 32, 128, 512, 1024, 4096, 10_000)


def planned(split: str, size: int, windows: int, labels: tuple[str, ...] = (), first: int = 0) -> list[Case]:
    """Return the windows of one size: that many with one fault, as many benign, and a fifth as many
    with several faults."""
    half = windows // 2
    given = cases(
        split,
        size,
        single=windows,
        concurrent=windows // 5,
        benign=windows - half,
        controls=half,
        labels=labels,
        first=first,
    )
    return in_turn(given)


def sources_digest() -> str:
    """Return the first digits of a digest of the watch's modules: figures name their code."""
    digest = hashlib.sha256()
    for path in sorted(Path(watcher.__file__).parent.glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    chosen = _parsed(arguments)
    if chosen.calibrate:
        return _calibrate(chosen)
    if chosen.cost:
        print(json.dumps(tick_costs(), indent=1))
        return 0
    if chosen.read:
        about, outcomes, cost = _merged(chosen.read)
    else:
        about, outcomes, cost = _measured(chosen, arguments)
    print_summary(outcomes)
    if chosen.json:
        write_raw(chosen.json, about, outcomes, cost)
    if chosen.page:
        chosen.page.write_text(page(about, outcomes, cost), encoding="utf-8")
    return 0


def _parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    def numbers(text: str) -> tuple[int, ...]:
        return tuple(int(part) for part in text.split(","))

    def names(text: str) -> tuple[str, ...]:
        return tuple(text.split(","))

    def part(text: str) -> tuple[int, int]:
        number, of = map(int, text.split("/"))
        if not 1 <= number <= of:
            raise argparse.ArgumentTypeError(f"{text}: expected parts from 1/N to N/N")
        return number, of

    parser = argparse.ArgumentParser(
        prog="headrace bench watch", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", type=numbers, default=SIZES, help="workers of the fleets")
    parser.add_argument("--windows", type=int, default=52, help="with one fault, and as many benign, a size")
    parser.add_argument("--seeds", choices=SPLITS, default="dev")
    parser.add_argument("--detectors", type=names, default=NAMES, help=", ".join(NAMES))
    parser.add_argument("--part", type=part, default=(1, 1), help="such as 2/3: every third window, from the second")
    parser.add_argument("--labels", type=names, default=(), help="only windows of these kinds")
    parser.add_argument("--first", type=int, default=0, help="number of each kind's first window: others, other seeds")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="a size: begin no window after that")
    parser.add_argument("--json", type=Path, help="write every window's outcome here")
    parser.add_argument("--page", type=Path, help="write the page here")
    parser.add_argument("--read", type=Path, nargs="+", help="earlier JSON in place of a run: one page of several")
    parser.add_argument("--calibrate", action="store_true", help="set thresholds on development seeds")
    parser.add_argument("--cost", action="store_true", help="only a tick's cost, at 10,000 workers and 13 metrics")
    parser.add_argument("--with-cost", action="store_true", help="a tick's cost, too")
    parser.add_argument("--verbose", action="store_true", help="a line for each window that the watch gets wrong")
    return parser.parse_args(arguments)


def _measured(
    chosen: argparse.Namespace, arguments: Sequence[str] | None
) -> tuple[dict[str, Any], dict[str, list[Outcome]], dict[str, float]]:
    thresholds = read_thresholds()
    outcomes: dict[str, list[Outcome]] = {name: [] for name in chosen.detectors}
    check_distinct(make_all(chosen.detectors, min(chosen.sizes), thresholds))
    for size in chosen.sizes:
        plan = planned(chosen.seeds, size, chosen.windows, chosen.labels, chosen.first)
        check_windows_distinct(plan)
        number, of = chosen.part
        plan = plan[number - 1 :: of]
        makes = make_all(chosen.detectors, size, thresholds)

        def shown(case: Case, found: dict[str, Outcome], number: int, of: int = len(plan)) -> None:
            own = found.get("watch")
            if chosen.verbose and own and (own.num_wrong or own.num_found < len(own.kinds)):
                delays = ", ".join(f"{delay:.0f} s" for delay in own.delays_s)
                print(f"{case}: {own.kinds} delays {delays}; {own.first}", flush=True)
            print(f"\r{case.size} workers, window {number} of {of}", end="", file=sys.stderr, flush=True)

        for name, rows in run_cases(plan, makes, max_s=60.0 * chosen.minutes, shown=shown).items():
            outcomes[name] += rows
        print(file=sys.stderr)
    about = provenance("watch", arguments, seeds=chosen.seeds, windows=chosen.windows, sizes=chosen.sizes)
    about["watch_sources"] = sources_digest()
    return about, outcomes, tick_costs() if chosen.with_cost else {}


def _merged(paths: Sequence[Path]) -> tuple[dict[str, Any], dict[str, list[Outcome]], dict[str, float]]:
    about: dict[str, Any] = {}
    outcomes: dict[str, list[Outcome]] = {}
    cost: dict[str, float] = {}
    for path in paths:
        head, rows = read_raw(path)
        cost = head.pop("tick_cost") or cost
        # a command is shown without the name of its file, parts of a run once
        shown = re.sub(r" --(json|part) \S+", "", head.get("command", ""))
        commands = list(dict.fromkeys([*about.get("commands", []), *head.get("commands", [shown])]))
        versions: dict[str, int] = about.get("watch_versions", {})
        of_file = {head.get("watch_sources", ""): len(rows.get("watch", ()))}
        for digest, number in head.get("watch_versions", of_file).items():
            versions[digest] = versions.get(digest, 0) + number
        about = {**head, "commands": commands, "watch_versions": versions}
        for name, of in rows.items():
            outcomes.setdefault(name, []).extend(of)
    return about, outcomes, cost


def _calibrate(chosen: argparse.Namespace) -> int:
    names = [name for name in TUNED if name in chosen.detectors]
    for size in chosen.sizes:
        half = chosen.windows // 2
        benign = in_turn(
            cases("dev", size, single=0, concurrent=0, benign=chosen.windows - half, controls=half, first=chosen.first)
        )
        if "watch" in chosen.detectors:
            _calibrate_watch(size, benign)
        if not names:
            continue
        found = highest_levels(benign, make_all(names, size, None))
        # read again: another size may have been set meanwhile
        known = read_thresholds() if THRESHOLDS.exists() else {}
        for name, levels in found.items():
            known.setdefault(name, {})[str(size)] = round(threshold(levels), 4)
            print(f"{name} at {size}: {known[name][str(size)]:g}, from {len(levels)} windows", flush=True)
        THRESHOLDS.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    return 0


def _calibrate_watch(size: int, benign: Sequence[Case]) -> None:
    """Fit the thresholds that the package brings, of one size."""
    found = []
    for number, case in enumerate(benign, 1):
        found.append(largest_strengths(open_fleet(case).frames(), WINDOW_S - 1.0))
        print(f"\r{size} workers, window {number} of {len(benign)}", end="", file=sys.stderr, flush=True)
    tail = fitted(found)
    merged([read_watch_thresholds(SHIPPED), Thresholds({size: tail})]).write(SHIPPED)
    print(f"\nwatch at {size}: {tail}, limits times {tail.strength(size):.2f}, from {len(found)} windows", flush=True)


if __name__ == "__main__":
    sys.exit(exit_code(main))
