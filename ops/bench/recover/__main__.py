"""``python -m ops.bench.recover``: how soon the work of a killed or frozen worker continues, and what it costs.

    python -m ops.bench.recover --role learner generator --minutes 10 --mean 30 --json bench-results/recover.json
    python -m ops.bench.recover --role generator --against fleet.standby=1

Each role has its own fleet, of real processes with emulated models. Faults arrive at seeded exponential gaps.
With --against each run is made twice, the second time with other settings and the same faults. Exit code 1 if a
bar does not hold."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from ops.bench.recover.processes import FAULTS, ROLES, PlannedRun, measure, onsets
from ops.bench.recover.trials import BASE, RunRecord, Trial, bars, compared, describe, tables
from ops.bench.table import provenance, write_json
from ops.drill.fleet import ROOT
from ops.ending import exit_code
from pipeline.process.progress_bar import tracked
from protocol.errors import ConfigError
from protocol.ids import Role


def planned(given: argparse.Namespace) -> Iterator[PlannedRun]:
    """Yield the runs: for each role and seed one of each compared fleet, in turns. Raises ConfigError for times
    that are not above 0."""
    for name in ("minutes", "warm", "mean"):
        value = getattr(given, name)
        if not 0.0 < value < float("inf"):
            raise ConfigError(f"--{name} is {value:g}; expected a finite number above 0")
    seconds = 60.0 * given.minutes
    for number, (seed, name) in enumerate((seed, role) for seed in given.seed for role in given.role):
        arrivals = onsets(given.mean, seed, seconds)
        plan = PlannedRun(BASE, Role(name), tuple(given.fault), arrivals, seed, given.warm, seconds, tuple(given.set))
        runs = _against(plan, given.against)
        yield from runs[number % len(runs) :]
        yield from runs[: number % len(runs)]


def _against(plan: PlannedRun, settings: Sequence[str] | None) -> list[PlannedRun]:
    other = [replace(plan, label=" ".join(settings), settings=(*plan.settings, *settings))] if settings else []
    return [plan, *other]


def _report(trial: Trial) -> None:
    print(f"  {describe(trial)}", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m ops.bench.recover", description="Repairs after faults, measured.")
    parser.add_argument(
        "--role", nargs="+", default=["learner", "generator"], choices=[*map(str, ROLES)], help="roles to strike"
    )
    parser.add_argument("--fault", nargs="+", default=list(FAULTS), choices=list(FAULTS), help="faults to draw from")
    parser.add_argument("--mean", type=float, default=30.0, metavar="SECONDS", help="mean gap between faults")
    parser.add_argument("--minutes", type=float, default=5.0, help="length of each run under faults")
    parser.add_argument("--warm", type=float, default=30.0, metavar="SECONDS", help="without faults, before and after")
    parser.add_argument("--seed", type=int, nargs="+", default=[0], help="one run of each role a seed")
    parser.add_argument("--set", action="append", default=[], metavar="SETTING=VALUE", help="settings of all runs")
    parser.add_argument("--against", nargs="+", metavar="SETTING=VALUE", help="compare with these settings")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every trial")
    given = parser.parse_args(arguments)
    runs = list[RunRecord]()
    os.chdir(ROOT)
    for plan in tracked(list(planned(given)), "runs", unit="runs"):
        print(f"{plan.role}, seed {plan.seed}, {plan.label}: {len(plan.onsets)} faults", flush=True)
        runs.append(measure(plan, _report))
        if given.json is not None:
            loads = [trial.load for run in runs for trial in run.trials] or [0.0]
            conditions = provenance("recover", arguments, seeds=given.seed, load=[min(loads), max(loads)])
            write_json(given.json, conditions | {"runs": [asdict(run) for run in runs]})
    print(f"\n{tables(runs)}\n\n{compared(runs)}")
    held = bars(runs)
    print("\n".join(f"{'holds' if value else 'DOES NOT HOLD'}: {bar}" for bar, value in held.items()))
    for run in runs:
        said = [*(f"ended without a fault: {words}" for words in run.healthy), *run.notes]
        print("\n".join(f"{run.role}, {run.label}: {words}" for words in said), end="\n" if said else "")
    return 0 if all(held.values()) else 1


if __name__ == "__main__":
    sys.exit(exit_code(main))
