"""``python -m ops.bench.recover``: how soon a killed or frozen worker's work goes on, and the cost.

    python -m ops.bench.recover --role learner generator --minutes 10 --mean 30 --json bench-results/recover.json
    python -m ops.bench.recover --role learner --fault kill --mean 120 --gaps failures.csv
    python -m ops.bench.recover --role generator --against fleet.standby=1
    python -m ops.bench.recover --shown bench-results/recover.json

Each role has a fleet of its own, of real processes with emulated models. Faults arrive by seeded
exponential gaps, or by those of a file, such as a published failure trace. Its gaps can be
rescaled. With --against each run is made twice, the second time with other settings and the same
faults.

*Consumes* seeds and perhaps a file. *Produces* tables, JSON, and exit code 1 when a bar does not
hold. *Waits for* the fleets."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from ops.bench.recover.arrivals import exponential, onsets, read_gaps, replayed, rescaled
from ops.bench.recover.processes import FAULTS, ROLES, PlannedRun, measure
from ops.bench.recover.trials import BASE, RunRecord, Trial, bars, compared, read_runs, spoken, tables, written
from ops.bench.table import provenance
from ops.drill.fleet import ROOT
from ops.ending import exit_code
from pipeline.process.progress_bar import tracked
from protocol.errors import ConfigError
from protocol.ids import Role

MEAN_S = 30.0


def planned(given: argparse.Namespace) -> Iterator[PlannedRun]:
    """Yield the runs: of each role and seed one for each of the compared fleets, in turns.

    Raises ConfigError for times that are not above 0, and DataError for a file with nonsense."""
    for name in ("minutes", "warm", "mean"):
        value = getattr(given, name)
        if value is not None and not 0.0 < value < float("inf"):
            raise ConfigError(f"--{name} is {value:g}; expected a finite number above 0")
    gaps = None if given.gaps is None else read_gaps(given.gaps)
    if gaps is not None and given.mean is not None:
        gaps = rescaled(gaps, given.mean)
    for number, (seed, name) in enumerate((seed, role) for seed in given.seed for role in given.role):
        role = Role(name)
        arriving = exponential(given.mean or MEAN_S, seed) if gaps is None else replayed(gaps, seed)
        plan = PlannedRun(BASE, role, tuple(given.fault), onsets(arriving, 60.0 * given.minutes), seed, given.warm,
                          60.0 * given.minutes, tuple(given.set))  # fmt: skip
        runs = _against(plan, given.against)
        yield from runs[number % len(runs) :]
        yield from runs[: number % len(runs)]


def _against(plan: PlannedRun, settings: Sequence[str] | None) -> list[PlannedRun]:
    other = [replace(plan, label=" ".join(settings), settings=(*plan.settings, *settings))] if settings else []
    return [plan, *other]


def _said(trial: Trial) -> None:
    print(f"  {spoken(trial)}", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m ops.bench.recover", description="Repairs after faults, measured.")
    parser.add_argument(
        "--role", nargs="+", default=["learner", "generator"], choices=[*map(str, ROLES)], help="struck"
    )
    parser.add_argument("--fault", nargs="+", default=list(FAULTS), choices=list(FAULTS), help="a seeded one each time")
    parser.add_argument("--mean", type=float, metavar="SECONDS", help=f"between faults; {MEAN_S:g}, or the file's own")
    parser.add_argument("--gaps", type=Path, metavar="FILE", help="CSV with a column gap_s, or arrivals: time_s, time")
    parser.add_argument("--minutes", type=float, default=5.0, help="of each run under faults")
    parser.add_argument("--warm", type=float, default=30.0, metavar="SECONDS", help="without faults, before and after")
    parser.add_argument("--seed", type=int, nargs="+", default=[0], help="one run of each role for each")
    parser.add_argument("--set", action="append", default=[], metavar="SETTING=VALUE", help="of all runs")
    parser.add_argument("--against", nargs="+", metavar="SETTING=VALUE", help="compare with these settings")
    parser.add_argument("--shown", type=Path, nargs="+", metavar="FILE", help="show earlier results instead")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every trial")
    given = parser.parse_args(arguments)
    runs = list[RunRecord]()
    if given.shown:
        runs = [run for file in given.shown for run in read_runs(file.read_text(encoding="utf-8"))]
    else:
        os.chdir(ROOT)
        for plan in tracked(list(planned(given)), "runs", unit="runs"):
            print(f"{plan.role}, seed {plan.seed}, {plan.label}: {len(plan.onsets)} faults", flush=True)
            runs.append(measure(plan, _said))
            if given.json is not None:
                loads = [trial.load for run in runs for trial in run.trials] or [0.0]
                conditions = provenance("recover", arguments, seeds=given.seed, load=[min(loads), max(loads)])
                given.json.parent.mkdir(parents=True, exist_ok=True)
                given.json.write_text(written(conditions, runs), encoding="utf-8")
    print(f"\n{tables(runs)}\n\n{compared(runs)}")
    held = bars(runs)
    print("\n".join(f"{'holds' if value else 'DOES NOT HOLD'}: {bar}" for bar, value in held.items()))
    for run in runs:
        said = [*(f"ended without a fault: {words}" for words in run.healthy), *run.notes]
        print("\n".join(f"{run.role}, {run.label}: {words}" for words in said), end="\n" if said else "")
    return 0 if all(held.values()) else 1


if __name__ == "__main__":
    sys.exit(exit_code(main))
