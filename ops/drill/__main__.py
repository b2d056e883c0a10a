"""Fault drills: does everything hold under every fault? ``ops.drill`` explains a drill.

    python -m ops.drill --seed 7             # repeat one drill
    python -m ops.drill --runs 200 --jobs 2  # seeds 0 to 199
    python -m ops.drill --minutes 30         # one long drill: two faults a minute, the kinds in turn

Prints a line for each drill and a table by kind of fault. The folder of a drill with a violation is kept."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import traceback
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

from ops.drill.check import Violation
from ops.drill.fleet import ROOT
from ops.drill.one import PATIENCE_S, Outcome, drill
from ops.drill.schedule import ENVIRONMENT_KINDS, KINDS, FaultKind, long_plan, plan
from ops.drill.truth import NAMING_S, TRUTHS
from ops.ending import exit_code
from pipeline.process.progress_bar import progress


def main(arguments: Sequence[str] | None = None) -> int:
    """Run drills; return 1 if something was violated."""
    parser = argparse.ArgumentParser(
        prog="python -m ops.drill",
        description="Run real fleets, inject faults by a seeded schedule, and check what must hold whatever fails.",
        epilog="Seeds in a row go through all kinds of fault in turn. A drill takes 12 to 40 s, so 200 take an hour, two at "
        "a time on two cores. Example: python -m ops.drill --seed 0 --runs 200 --jobs 2 --json drills.jsonl",
    )
    parser.add_argument("--seed", type=int, nargs="+", default=[0], metavar="SEED", help="one drill each (default: 0)")
    parser.add_argument("--runs", type=int, default=1, help="number of drills from the last seed on (default: 1)")
    parser.add_argument("--jobs", type=int, default=1, help="drills at once (default: %(default)s)")
    parser.add_argument("--engine", choices=["emulated", "local"], default="emulated", help="(default: %(default)s)")
    parser.add_argument(
        "--patience",
        type=float,
        default=PATIENCE_S,
        help="seconds without an update before a run counts as stuck; allow more on a busy machine (default: %(default)g)",
    )
    parser.add_argument(
        "--only", nargs="+", metavar="KIND", help=f"draw from these kinds of fault: {', '.join(FaultKind)}"
    )
    parser.add_argument("--environment", action="store_true", help="with an environment, and faults of its workers")
    parser.add_argument("--set", action="append", default=[], metavar="SETTING=VALUE", help="settings of each fleet")
    parser.add_argument(
        "--minutes", type=float, help="make each drill this long, with two faults a minute of all kinds"
    )
    parser.add_argument("--keep", action="store_true", help="also keep the folders of drills without a violation")
    parser.add_argument("--json", type=Path, help="append each outcome to this file, one JSON object a line")
    options = parser.parse_args(arguments)
    every = ENVIRONMENT_KINDS if options.environment else KINDS
    kinds = [FaultKind(kind) for kind in options.only] if options.only else list(every)
    os.chdir(ROOT)
    outcomes: list[Outcome] = []
    seeds = [*options.seed[:-1], *range(options.seed[-1], options.seed[-1] + options.runs)]
    with progress("drills", total=len(seeds), unit="drills") as bar:
        for outcome in _drills(seeds, kinds, options):
            outcomes.append(outcome)
            print(line(outcome), flush=True)
            bar.advance()
            if options.json:
                with options.json.open("a") as file:
                    file.write(json.dumps(asdict(outcome), default=str) + "\n")
    print("\n" + table(outcomes))
    print("\n" + naming_table(outcomes))
    return int(any(outcome.violations for outcome in outcomes))


def _drills(seeds: Iterable[int], kinds: Sequence[FaultKind], options: argparse.Namespace) -> Iterator[Outcome]:
    def one(seed: int) -> Outcome:
        schedule = long_plan(seed, options.minutes) if options.minutes else plan(seed, kinds)
        folder = folder_of(seed)
        try:
            return drill(
                schedule,
                folder,
                engine=options.engine,
                patience_s=options.patience,
                keep=options.keep,
                changes=options.set,
                environment=options.environment,
            )
        except Exception as error:  # noqa: BLE001 - the other drills of an hour still run
            broke = Violation("the drill itself runs", "".join(traceback.format_exception(error)).rstrip())
            return Outcome(
                seed, schedule.algorithm, tuple(str(kind) for kind in schedule.kinds), [broke], folder=folder
            )

    with ThreadPoolExecutor(options.jobs) as pool:
        yield from pool.map(one, seeds)


def folder_of(seed: int) -> Path:
    """Make the folder of a seed's drill in the system's temporary folder: the paths of its sockets must be short."""
    return Path(tempfile.mkdtemp(prefix=f"drill-{seed}-"))


def line(outcome: Outcome) -> str:
    """Describe a drill's outcome in one line, and each violation in another."""
    resumed = ", ".join(f"{seconds:.1f}" for seconds in outcome.resume_s)
    text = (
        f"seed {outcome.seed}: {'VIOLATED' if outcome.violations else 'ok'}; {outcome.algorithm}, "
        f"{', '.join(outcome.targets) or 'no fault'}; {outcome.num_updates} updates in {outcome.wall_s:.0f} s, "
        f"resumed after {resumed or '-'} s"
    )
    if outcome.num_relayed:
        text += f"; {outcome.num_damaged} of {outcome.num_relayed} messages damaged"
    if outcome.num_dead_letters:
        text += f"; {outcome.num_dead_letters} responses without a verdict"
    for cost in outcome.costs:
        text += f"; {cost.worker} took {cost.num_lost} tokens of {cost.num_in_flight} trajectories with it"
        text += f" ({cost.num_sampled_again} sampled again)"
    for naming in outcome.namings:
        named = f"after {naming.seconds:.1f} s" if naming.seconds is not None else "NOT in time"
        text += f"\n    why: {naming.kind}: named {named}: {naming.answer}"
    for note in outcome.notes:
        text += f"\n    note: {note}"
    for violation in outcome.violations:
        text += f"\n    {violation.invariant}: {violation.detail}"
    if outcome.folder is not None:
        text += f"\n    folder: {outcome.folder}; again: python -m ops.drill --seed {outcome.seed}"
    return text


def table(outcomes: Sequence[Outcome]) -> str:
    """Summarise by kind of fault; a drill counts under every kind that it had."""
    rows = [("fault", "drills", "violated", "resumed, median s", "longest s", "sampled again")]
    for kind in (*FaultKind, None):
        chosen = [outcome for outcome in outcomes if kind is None or str(kind) in outcome.kinds]
        if not chosen:
            continue
        resumed = [seconds for outcome in chosen for seconds in outcome.resume_s]
        again = sum(cost.num_sampled_again for outcome in chosen for cost in outcome.costs)
        rows.append(
            (
                str(kind) if kind else "all",
                str(len(chosen)),
                str(sum(bool(outcome.violations) for outcome in chosen)),
                f"{statistics.median(resumed):.1f}" if resumed else "-",
                f"{max(resumed):.1f}" if resumed else "-",
                str(again),
            )
        )
    return _aligned(rows)


def naming_table(outcomes: Sequence[Outcome]) -> str:
    """Summarise by kind of fault how soon ``headrace why`` named the true cause."""
    rows = [("headrace why", "asked", f"named within {NAMING_S:g} s", "median s", "longest s", "what counts as named")]
    for kind, truth in TRUTHS.items():
        found = [naming.seconds for one in outcomes for naming in one.namings if naming.kind == kind]
        if not found:
            continue
        took = [seconds for seconds in found if seconds is not None]
        rows.append(
            (
                str(kind),
                str(len(found)),
                str(len(took)),
                f"{statistics.median(took):.1f}" if took else "-",
                f"{max(took):.1f}" if took else "-",
                truth.cause,
            )
        )
    return _aligned(rows)


def _aligned(rows: Sequence[tuple[str, ...]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


if __name__ == "__main__":
    sys.exit(exit_code(main))
