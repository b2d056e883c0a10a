"""``headrace bench trace``: whether the cause of a fault is named, on real and on emulated fleets.

    headrace bench trace --seeds 2 --json bench-results/trace-processes.json
    headrace bench trace --first 1002 --seeds 2 --json bench-results/trace-processes-2.json
    headrace bench trace --only "cut edge" "frozen learner"
    headrace bench trace --emulated --json bench-results/trace.json
    headrace bench trace --emulated --shown bench-results/trace.json

Without --emulated the faults are injected into the processes of a real fleet, and the answers are
those of its observer (``ops.bench.trace.processes``).

Seeds of development are 0 to 99: limits were chosen on them. Seeds from 1000 on are frozen: they
are for the page alone. Every detector reads the same tables. *Consumes* the seeds. *Produces*
tables on standard output, JSON, and exit code 1 when a bar does not hold. *Waits for* real fleets
alone."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from math import isinf
from pathlib import Path

from ops.bench.table import provenance, show
from ops.bench.trace.baselines import StallRule
from ops.bench.trace.faults import CONTROLS, FAULTS, inject
from ops.bench.trace.model import SHAPES, EmulatedFleet
from ops.bench.trace.processes import ACT_S, LINGER_S, SETTINGS, planned, try_all
from ops.bench.trace.sampling import record
from ops.bench.trace.scoring import Answer, answer, flow_watch, quantile, read_answers, wilson, written
from ops.bench.trace.trials import TrialRecord, acted_table, holds, misses, read_trials, spoken, tables
from ops.bench.trace.trials import written as written_trials
from ops.drill.catalogue import CATALOGUE
from ops.ending import exit_code
from pipeline.process.progress_bar import progress, tracked
from protocol.errors import ConfigError

FROZEN = 1000
"""First of the frozen seeds."""
DURATION_S = 180.0
SLOWNESS = ("slow generator", "slow scorer", "slow link")
"""Faults that stop nothing: their delay is not that of a stall."""
TOP1, TOP3, BENIGN, TRIGGER_S, NAMED_S = 0.95, 0.99, 0.02, 15.0, 2.0
"""The bars."""


def runs_of(sizes: Sequence[int], seeds: int, first: int) -> list[tuple[int, str, int]]:
    """Return size, kind and seed of every run. Fleets of 98 have a third of the seeds."""
    return [
        (size, kind, first + seed)
        for size in sizes
        for kind in (*FAULTS, *CONTROLS)
        for seed in range(seeds if size < 98 else max(1, seeds // 3))
    ]


def one(size: int, kind: str, seed: int, interval_s: float, baselines: bool) -> list[Answer]:
    """Run all detectors on one fleet."""
    fleet = EmulatedFleet(size, 1_000_003 * seed + size + sum(map(ord, kind)))
    truth = inject(fleet, kind)
    tables = record(fleet, DURATION_S, interval_s=interval_s)
    found = [answer("flow", flow_watch(), tables, truth, size, seed)]
    if baselines:
        rules = ("oldest silent heartbeat", "longest queue")
        found += [answer(by, StallRule(by).tick, tables, truth, size, seed) for by in rules]
    return found


def share(answers: Sequence[Answer], *, by: str) -> str:
    """Return a share with its Wilson interval."""
    right = sum(getattr(each, by) for each in answers)
    low, high = wilson(right, len(answers))
    return f"{right / len(answers):.3f} ({low:.3f} to {high:.3f})" if answers else "-"


def seconds(value: float) -> str:
    """Return seconds, a miss as such."""
    return "missed" if isinf(value) else f"{value:.1f}"


def report(answers: Sequence[Answer]) -> bool:
    """Print the tables; return whether all bars hold."""
    ours = [each for each in answers if each.detector == "flow"]
    faults, controls = [e for e in ours if e.is_fault], [e for e in ours if not e.is_fault]
    rows = [_row(kind, [e for e in faults if e.kind == kind]) for kind in FAULTS]
    rows += [_row(f"all, {size} workers", [e for e in faults if e.size == size]) for size in SHAPES]
    rows.append(_row("all", faults))
    columns = ("fault", "runs", "top-1", "top-3", "onset to trigger P50", "P95", "trigger to name P95")
    show("Causes", columns, [row for row in rows if row[1] != "0"])
    kinds = {kind: [e for e in controls if e.kind == kind] for kind in CONTROLS}
    blamed = [(kind, str(len(of)), share(of, by="has_false")) for kind, of in kinds.items() if of]
    show(
        "Negative controls",
        ("control", "runs", "blamed"),
        [*blamed, ("all", str(len(controls)), share(controls, by="has_false"))],
    )
    detectors = dict.fromkeys(each.detector for each in answers)
    show(
        "Detectors",
        ("detector", "top-1", "top-3", "blame in controls"),
        [_detector(name, answers) for name in detectors],
    )
    stalls = [e for e in faults if e.kind not in SLOWNESS]
    holds = {
        f"top-1 >= {TOP1}": _share(faults, "is_top1") >= TOP1,
        f"top-3 >= {TOP3}": _share(faults, "is_top3") >= TOP3,
        f"blame in controls <= {BENIGN}": _share(controls, "has_false") <= BENIGN,
        f"stall: onset to trigger P95 <= {TRIGGER_S} s": quantile([e.trigger_s for e in stalls], 0.95) <= TRIGGER_S,
        f"trigger to name P95 <= {NAMED_S} s": quantile([e.named_s for e in faults if e.named], 0.95) <= NAMED_S,
    }
    show("Bars", ("bar", "holds"), [(bar, "yes" if value else "no") for bar, value in holds.items()])
    for size in SHAPES:
        of = [e for e in ours if e.size == size]
        if of:
            mean, slowest = max(e.mean_ms for e in of), max(e.analysis_ms for e in of)
            print(f"{size} workers: a tick takes {mean:.1f} ms at most on average, {slowest:.0f} ms at worst")
    return all(holds.values())


def _share(answers: Sequence[Answer], by: str) -> float:
    return sum(getattr(each, by) for each in answers) / len(answers) if answers else 1.0


def _row(name: str, answers: Sequence[Answer]) -> tuple[str, ...]:
    triggers, named = [e.trigger_s for e in answers], [e.named_s for e in answers if e.named_s is not None]
    middle, late = quantile(triggers, 0.5), quantile(triggers, 0.95)
    return (
        name, str(len(answers)), share(answers, by="is_top1"), share(answers, by="is_top3"), seconds(middle),
        seconds(late), seconds(quantile(named, 0.95)),
    )  # fmt: skip


def _detector(name: str, answers: Sequence[Answer]) -> tuple[str, ...]:
    own = [each for each in answers if each.detector == name]
    faults, controls = [e for e in own if e.is_fault], [e for e in own if not e.is_fault]
    return name, share(faults, by="is_top1"), share(faults, by="is_top3"), share(controls, by="has_false")


def on_processes(given: argparse.Namespace, arguments: Sequence[str] | None, seeds: Sequence[int]) -> int:
    """Try faults on real processes, or show earlier trials; print the page's tables."""
    if given.shown:
        trials = [each for file in given.shown for each in read_trials(file.read_text(encoding="utf-8"))]
    else:
        trials = list[TrialRecord]()
        order = planned(seeds, [each for each in CATALOGUE if given.only is None or each.name in given.only])
        if not order:
            names = ", ".join(each.name for each in CATALOGUE)
            raise ConfigError(f"--only has no name of the catalogue; expected some of: {names}")
        limit_s = 60.0 * given.minutes
        with progress("trials", total=len(order), unit="trials") as bar:
            settings = (*SETTINGS, "recovery.policy=act") if given.act else SETTINGS
            for trial in try_all(order, limit_s=limit_s, settings=settings, linger_s=ACT_S if given.act else LINGER_S):
                trials.append(trial)
                print(spoken(trial), flush=True)
                bar.advance()
                if given.json is not None:
                    loads = [each.load for each in trials]
                    conditions = provenance("trace", arguments, seeds=[*seeds], load=[min(loads), max(loads)])
                    given.json.parent.mkdir(parents=True, exist_ok=True)
                    given.json.write_text(written_trials(conditions, trials), encoding="utf-8")
    print(f"{tables(trials)}\n\n{misses(trials)}")
    if given.act or any(trial.acted for trial in trials):
        print(f"\n{acted_table(trials)}")
    return 0 if holds(trials) else 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and return the exit code."""
    parser = argparse.ArgumentParser(prog="headrace bench trace", description="Causes of faults, as they are named.")
    parser.add_argument("--emulated", action="store_true", help="fleets in virtual time, not real processes")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="real processes: these faults and controls alone")
    parser.add_argument("--act", action="store_true", help="real processes: the ladder acts on incidents")
    parser.add_argument("--minutes", type=float, default=60.0, help="real processes: no trial begins later")
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SHAPES), choices=list(SHAPES), help="of fleets")
    parser.add_argument("--seeds", type=int, default=10, help="runs of each kind; a third of them with 98 workers")
    parser.add_argument("--development", action="store_true", help="seeds from 0 on, on which limits are chosen")
    parser.add_argument("--first", type=int, metavar="SEED", help="the first seed; the default is 1000, or 0")
    parser.add_argument("--interval", type=float, default=1.0, metavar="SECONDS", help="between two rows of a worker")
    parser.add_argument("--no-baselines", action="store_true", help="the analysis alone")
    parser.add_argument("--shown", type=Path, nargs="+", metavar="FILE", help="show answers of earlier runs instead")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every answer")
    given = parser.parse_args(arguments)
    first = given.first if given.first is not None else 0 if given.development else FROZEN
    if not given.emulated:
        return on_processes(given, arguments, range(first, first + given.seeds))
    answers = list[Answer]()
    if given.shown:
        every = [each for file in given.shown for each in read_answers(file.read_text(encoding="utf-8"))]
        return 0 if report(every) else 1
    for size, kind, seed in tracked(runs_of(given.sizes, given.seeds, first), "runs", unit="runs"):
        answers += one(size, kind, seed, given.interval, not given.no_baselines)
    holds = report(answers)
    if given.json is not None:
        conditions = provenance("trace", arguments, first_seed=first, seeds=given.seeds, interval_s=given.interval)
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(written(conditions, answers), encoding="utf-8")
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(exit_code(main))
