"""Measure what it costs a fleet to be watched and traced: pairs of runs with and without.

    python -m ops.bench.overhead.observing --json ops/results/observing.json

With: an observer, and flow records of every worker, as is the default. Without: neither. Two fleets
are known. ``devices`` has two emulated devices that sample 2,000 tokens a second each, as the bench
of the control plane has. Its rate is what a fleet on accelerators loses. ``demo`` learns on the
processor, where processor time is the rate; two wall-clock rates of one kind differ by 8 % there.

Each run is measured from 15 s after its first update to its last one. The processor time is user
and system time of all of a fleet's processes, by role. The observer's own is read apart, and has no
other run's noise in it.

*Consumes* the demo. *Produces* a table, JSON, and exit code 1 when the bar does not hold. *Waits
for* the runs. The two runs of a pair follow one another on one seed, and each pair begins with the
other kind. So a machine that slows down does so for both."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from ops.bench.fleet_run import train
from ops.bench.overhead.fleet import CONFIG
from ops.bench.overhead.processes import FleetProcesses, spent_between
from ops.bench.overlap.measure import prepare_data, prepare_model
from ops.bench.table import Spread, provenance, show, write_json
from ops.demo.task import main as write_data
from ops.ending import exit_code
from pipeline.config.load import load_config, resolve_paths
from pipeline.observability.history import HISTORY_NAME, UpdateRow, read_history
from pipeline.observability.intervals import mean_of
from pipeline.process.progress_bar import tracked
from protocol.errors import DataError
from protocol.ids import Role

BAR: Final = 0.01
"""Largest loss in the median pair, as a share: of the rate of devices, or of the demo's processor
time a trained token."""
OBSERVER: Final = str(Role.OBSERVER)
_ROOT: Final = Path(__file__).resolve().parents[3]
FILES: Final = {
    "devices": (_ROOT / CONFIG,),
    "demo": (_ROOT / "configs" / "demo.toml", _ROOT / "configs" / "fleets" / "demo.toml"),
}
UPDATES: Final = {"devices": 60, "demo": 100}
OFF: Final = ("supervisor.flow_records=false", "observer.enabled=false")
WARMUP_S: Final = 15.0
"""After the first update: imports, first computations, and the first tokens."""
_LIMIT_S: Final = 900.0


@dataclass(frozen=True, slots=True)
class RunCost:
    """One run, from its warm-up to its last update."""

    seconds: float
    tokens: int
    """Trained."""
    cpu_s: dict[str, float]
    """By role."""

    @property
    def rate(self) -> float:
        """Trained tokens a second."""
        return self.tokens / self.seconds

    def per_token(self, role: str | None = None) -> float:
        """Return processor seconds a trained token, of a role or of all."""
        return (sum(self.cpu_s.values()) if role is None else self.cpu_s.get(role, 0.0)) / self.tokens


@dataclass(frozen=True, slots=True)
class Pair:
    """Two runs, one after the other. All figures are shares of the run without."""

    on: RunCost
    off: RunCost

    @property
    def rate_loss(self) -> float:
        """Of the wall-clock rate; below 0 by noise."""
        return 1.0 - self.on.rate / self.off.rate

    @property
    def more_cpu(self) -> float:
        """Further processor time a trained token, of all processes."""
        return self.on.per_token() / self.off.per_token() - 1.0

    @property
    def observer(self) -> float:
        """The observer's own processor time a trained token."""
        return self.on.per_token(OBSERVER) / self.off.per_token()

    def of_role(self, role: str) -> float:
        """Return a role's further processor time a trained token, as a share of all roles'."""
        return (self.on.per_token(role) - self.off.per_token(role)) / self.off.per_token()


def cost_of(rows: Sequence[UpdateRow], looks: Sequence[tuple[float, dict[str, float]]]) -> RunCost:
    """Return what a run cost from its warm-up to the last update that was looked at. Raises
    DataError: it was too short, or not seen."""
    if not looks or looks[0][0] > rows[0].at_s + WARMUP_S or looks[-1][0] < rows[-1].at_s - WARMUP_S:
        raise DataError("the fleet's processes were not seen from its warm-up to its end: expected a look every 2 s")
    after = [row for row in rows if rows[0].at_s + WARMUP_S <= row.at_s <= looks[-1][0]]
    if len(after) < 2:
        raise DataError(
            f"{len(after)} updates ended more than {WARMUP_S:g} s after the first, expected two or more: give --updates "
            "a larger number"
        )
    begin_s, end_s = after[0].at_s, after[-1].at_s
    tokens = sum(row.num_trained_tokens for row in after[1:])
    return RunCost(end_s - begin_s, tokens, spent_between(looks, begin_s, end_s))


def settings_of(fleet: str, work: Path) -> list[str]:
    """Return a fleet's own overrides; what they name is written below ``work``."""
    if fleet == "demo":
        write_data(["--out", str(work / "data")])
        return [
            f"data.train=['{work / 'data' / 'train.jsonl'}']", f"data.evaluation=['{work / 'data' / 'heldout.jsonl'}']",
            "evaluation.every_updates=0",
        ]  # fmt: skip
    # an update every three seconds, so that a window of two minutes begins and ends with one
    return [
        f"model.path={prepare_model(work / 'model')}", f"data.train=['{prepare_data(work / 'data')}']",
        "algorithm.groups_per_update=4", "emulation.median_tokens=256", "generation.max_response_tokens=1000",
        "generation.window_tokens=256",
    ]  # fmt: skip


def measure(fleet: str, work: Path, *, seed: int, num_updates: int, settings: Sequence[str] = ()) -> RunCost:
    """Train once. Raises DataError when the run fails or was not seen."""
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    overrides = [
        f"run.seed={seed}", f"run.num_updates={num_updates}", f"run.dir={work}", "run.name=run",
        *settings_of(fleet, work), *settings,
    ]  # fmt: skip
    config = resolve_paths(load_config(FILES[fleet], overrides))
    processes = FleetProcesses(config)
    train(FILES[fleet], overrides, config.run_dir, limit_s=_LIMIT_S, on_poll=processes.look)
    rows = [row for row in read_history(config.run_dir / HISTORY_NAME) if isinstance(row, UpdateRow)]
    return cost_of(rows, processes.looks)


def figures(pairs: Sequence[Pair]) -> list[tuple[str, Sequence[float]]]:
    """Return each figure's name and its value in every pair, in per cent."""
    roles = sorted({role for pair in pairs for role in (*pair.on.cpu_s, *pair.off.cpu_s)} - {OBSERVER})
    named: list[tuple[str, Callable[[Pair], float]]] = [
        ("loss of the wall-clock rate", lambda pair: pair.rate_loss),
        ("further processor time a token", lambda pair: pair.more_cpu),
        ("  of it the observer's own", lambda pair: pair.observer),
        *((f"  {role}", lambda pair, role=role: pair.of_role(role)) for role in roles),
        ("observer, of one core", lambda pair: pair.on.cpu_s.get(OBSERVER, 0.0) / pair.on.seconds),
        ("all processes, of one core", lambda pair: sum(pair.on.cpu_s.values()) / pair.on.seconds),
    ]
    return [(name, [100.0 * of(pair) for pair in pairs]) for name, of in named]


def holds(fleet: str, pairs: Sequence[Pair]) -> bool:
    """Return whether the bar holds: for the rate of devices, or for the demo's processor time."""
    return Spread.of([pair.rate_loss if fleet == "devices" else pair.more_cpu for pair in pairs]).median < BAR


def _row(name: str, values: Sequence[float]) -> tuple[object, ...]:
    spread, mean = Spread.of(values), mean_of(values)
    interval = f"{mean.value:+.2f} ({mean.low:+.2f} to {mean.high:+.2f})" if mean is not None else "one pair"
    return (name, f"{spread.median:+.2f}", f"{spread.low:+.2f} to {spread.high:+.2f}", interval)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write; return 1 when the bar does not hold."""
    parser = argparse.ArgumentParser(prog="python -m ops.bench.overhead.observing", description=__doc__)
    parser.add_argument("--fleet", choices=sorted(FILES), default="devices", help="(default: %(default)s)")
    parser.add_argument("--updates", type=int, help=f"of a run (default: {UPDATES})")
    parser.add_argument("--pairs", type=int, default=20, help="of runs (default: %(default)s)")
    parser.add_argument("--set", dest="settings", action="append", default=[], metavar="SECTION.KEY=VALUE")
    parser.add_argument("--work", type=Path, default=Path("bench-results/observing"), help="(default: %(default)s)")
    parser.add_argument("--json", type=Path, help="write the figures here, too")
    options = parser.parse_args(arguments)
    work, fleet = options.work.absolute(), str(options.fleet)
    options.updates = options.updates or UPDATES[fleet]

    def run(seed: int, *settings: str) -> RunCost:
        return measure(fleet, work, seed=seed, num_updates=options.updates, settings=(*options.settings, *settings))

    pairs: list[Pair] = []
    for seed in tracked(range(options.pairs), "observing", "pairs"):
        if seed % 2:
            off = run(seed, *OFF)
            pairs.append(Pair(run(seed), off))
        else:
            on = run(seed)
            pairs.append(Pair(on, run(seed, *OFF)))
        one = pairs[-1]
        print(
            f"pair {seed + 1}: {one.rate_loss:+.2%} of the rate, {one.more_cpu:+.2%} processor time a token, of it "
            f"{one.observer:.2%} the observer's; {one.on.seconds:.0f} and {one.off.seconds:.0f} s",
            flush=True,
        )
        if options.json:
            # after each pair: a long measurement that is ended keeps the whole ones
            write_json(options.json, _told(pairs, arguments, options))
    found = figures(pairs)
    show(
        f"An observer and flow records, {len(pairs)} pairs of {fleet}; shares of the run without, in per cent",
        ("", "median", "least to most", "mean, with its interval of 95 %"),
        [_row(name, values) for name, values in found],
    )
    verdict = "holds" if holds(fleet, pairs) else "DOES NOT HOLD"
    what = "loss of the rate" if fleet == "devices" else "further processor time a token"
    print(f"less than {BAR:.0%} {what}: {verdict}")
    return int(not holds(fleet, pairs))


def _told(pairs: Sequence[Pair], arguments: Sequence[str] | None, options: argparse.Namespace) -> dict[str, Any]:
    told = provenance(
        "overhead.observing", arguments, fleet=options.fleet, updates=options.updates, seeds=list(range(len(pairs)))
    )
    told["command"] = told["command"].replace("headrace bench ", "python -m ops.bench.", 1)
    return told | {"bar": BAR, "figures": dict(figures(pairs)), "pairs": [asdict(pair) for pair in pairs]}


if __name__ == "__main__":
    sys.exit(exit_code(main))
