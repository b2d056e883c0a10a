"""A long drill: one fleet under faults of all kinds for half an hour, and the rate that it keeps.

    python -m ops.drill.soak --minutes 30 --seed 0     # or: make soak-faults
    python -m ops.drill.soak --minutes 3

*Consumes* a seed. *Produces* a table of each kind's cost, and the rate kept. Exit code 1: an
invariant was violated, or too little of the rate was kept. *Waits for* three fleets of the same
seed: one without faults, one with them, one without. The rate without faults is the mean of both,
so that a machine that becomes slower or faster meanwhile counts half.

The run with faults has as many updates to take as a fleet without faults takes in the time. It ends
by itself, so that a drill's whole check holds for it: nothing is in flight at the end. Its rate is
that of the time with faults, and not of what is left after it. A stopped run is resumed at once;
``headrace why`` runs in drills alone. A fault ends before the next one begins. Its cost is the time
until the next, less the usual time of the updates that were made in it."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import random
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median

from ops.drill.check import Violation
from ops.drill.events import Stalled
from ops.drill.faults import Site, Striking, small_disk
from ops.drill.fleet import ROOT, DrillFleet, each_turn
from ops.drill.one import DrillWatch, conclude, judge
from ops.drill.relay import Relays
from ops.drill.schedule import FaultKind, PlannedFault, planned_fault
from ops.drill.witness import Witness
from ops.ending import exit_code
from pipeline.observability.effective_reader import EffectiveTimeReader
from pipeline.observability.effective_time import EffectiveTime
from pipeline.observability.repairs import RepairRow, read_repairs
from pipeline.process.progress_bar import progress
from protocol.errors import ConfigError

KEPT = 0.95
"""Bar: the rate with faults over the rate without."""
A_MINUTE = 2.0
"""Faults a minute: 60 in half an hour."""
SETTINGS = (
    "emulation.step_s=1.0", "checkpoint.every_updates=10", "observer.enabled=true",
)  # fmt: skip
"""Over ``configs/drill.toml``; slower, so that the history of half an hour can be read."""
_LEFT_OUT = frozenset(
    {
        FaultKind.LINK_CUT,
        FaultKind.KILL_VALUE,
        FaultKind.SLOW_VERDICTS,
        FaultKind.LATE_VERDICTS,
        FaultKind.TINY_MEMORY,
        FaultKind.BUSY_SERVER,
        FaultKind.ENDLESS_SCRIPT,
    }
)
"""The first needs a fleet by tcp, between which no relay can stand; the second a critic; the next three
settings or a memory of their own. While a script runs, there is no rate to keep."""
_DISKS = {FaultKind.DISK_FULL: ("checkpoints", 256 << 20), FaultKind.DISK_FULL_LEDGER: ("ledger", 384 << 20)}
_BASELINE_SHARE = 1 / 10
_LEAST_BASELINE_S = 30.0
_LONGEST_S = 120.0
_EARLIEST_S = 5.0
_PATIENCE_S = 120.0


@dataclass(frozen=True, slots=True)
class SoakFault:
    """One fault, and its cost."""

    kind: str
    target: str
    begun_s: float
    ended_s: float
    """After the first fault's earliest moment."""
    lost_s: float = 0.0
    """Until the next fault: time without the updates that a fleet without faults makes in it."""


@dataclass(frozen=True, slots=True)
class SoakRecord:
    """One soak."""

    seed: int
    minutes: float
    settings: tuple[str, ...]
    usual_s: tuple[float, float]
    """Mean from one update to the next without faults, before and after."""
    wall_s: float
    """Time with faults: the minutes, or less where the run was over before."""
    num_updates: int
    """In ``wall_s``; repeated ones count once."""
    faults: tuple[SoakFault, ...]
    violations: tuple[Violation, ...]
    by_steps: float | None
    by_device: float | None
    repair_s: tuple[float, ...]
    """From progress to progress, of each repair."""
    notes: tuple[str, ...]
    load: tuple[float, float]
    """Load average of the machine over a minute, at the begin and at the end."""

    @property
    def kept(self) -> float:
        """The rate with faults over the rate without."""
        return self.num_updates * fmean(self.usual_s) / self.wall_s


def planned(seed: int, minutes: float) -> tuple[tuple[float, PlannedFault], ...]:
    """Return the faults of a seed with their times in seconds, the kinds in turn.

    Each kind comes once before one comes twice. Gaps are half to one and a half of their mean."""
    rng = random.Random(f"soak/{seed}")
    kinds = [kind for kind in FaultKind if kind not in _LEFT_OUT]
    number = math.ceil(A_MINUTE * minutes)
    mean_s = 60.0 / A_MINUTE
    faults, turn = list[tuple[float, PlannedFault]](), list[FaultKind]()
    for at in range(number):
        turn = turn or rng.sample(kinds, len(kinds))
        at_s = _EARLIEST_S + mean_s * (at + rng.uniform(-0.5, 0.5) / 2 + 0.25)
        faults.append((at_s, planned_fault(turn.pop(), rng)))
    return tuple(faults)


def with_costs(
    faults: Sequence[SoakFault], updates_at_s: Sequence[float], end_s: float, usual_s: float
) -> list[SoakFault]:
    """Return the faults with their costs. All times are on one clock.

    A fault's time is from its begin to the next one's; its cost is never below 0."""
    begins = [fault.begun_s for fault in faults]
    found = list[SoakFault]()
    for fault, until_s in zip(faults, [*begins[1:], end_s], strict=True):
        num = sum(fault.begun_s < at_s <= until_s for at_s in updates_at_s)
        lost_s = max(0.0, until_s - fault.begun_s - num * usual_s)
        found.append(SoakFault(fault.kind, fault.target, fault.begun_s, fault.ended_s, round(lost_s, 2)))
    return found


# -- fleets ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def _fleet(folder: Path, seed: int, settings: Sequence[str]) -> Iterator[tuple[DrillFleet, Site]]:
    """Make a fleet with relays before its scorers; start nothing."""
    fleet = DrillFleet(folder, [*SETTINGS, f"run.seed={seed}", *settings])
    site = Site(fleet, asks=False)
    site.relays = Relays(folder / "relays", seed)
    try:
        yield fleet, site
    finally:
        fleet.close()
        site.relays.close()


def _keep_history(fleet: DrillFleet) -> None:
    """Keep the server from writing its file anew, which is the run's history. Each new server needs
    the order again."""
    fleet.ledger("CONFIG", "SET", "auto-aof-rewrite-percentage", "0")


def _usual_s(seed: int, settings: Sequence[str], seconds: float) -> float:
    """Return the mean time of an update without faults. Raises ConfigError without updates."""
    with _fleet(_folder(seed), seed, [*settings, "run.num_updates=1000000"]) as (fleet, site):
        fleet.start()
        watch = DrillWatch(site, _PATIENCE_S)
        if not watch.updates(5) or fleet.is_over():
            raise ConfigError(f"the fleet without faults takes no updates: see {fleet.output}")
        first, began_s = watch.num_seen, _last_s(fleet)
        for _ in each_turn(seconds):
            watch.look()
        number, ended_s = watch.num_seen - first, _last_s(fleet)
    if number < 1:
        raise ConfigError(f"no update in {seconds:g} s without faults: see {fleet.output}")
    fleet.remove()
    return (ended_s - began_s) / number


def _last_s(fleet: DrillFleet) -> float:
    return fleet.updates()[-1].at_s


def _folder(seed: int) -> Path:
    return Path(tempfile.mkdtemp(prefix=f"soak-{seed}-"))


def soak(seed: int, minutes: float, settings: Sequence[str] = ()) -> tuple[SoakRecord, Path | None]:
    """Run the three fleets; return the record, and the folder of the one with faults when something
    was violated. Raises ConfigError when a fleet without faults takes no updates."""
    baseline_s = max(_LEAST_BASELINE_S, 60.0 * minutes * _BASELINE_SHARE)
    before_s = _usual_s(seed, settings, baseline_s)
    num_updates = max(10, round(60.0 * minutes / before_s))
    folder, load = _folder(seed), os.getloadavg()[0]
    struck, times = list[SoakFault](), dict[int, float]()
    with contextlib.ExitStack() as stack:
        fleet, site = stack.enter_context(_fleet(folder, seed, [*settings, f"run.num_updates={num_updates}"]))
        for name, num_bytes in _DISKS.values():
            if stack.enter_context(small_disk(fleet.run_dir / name, num_bytes)):
                site.disks.add(name)
        witness = Witness(fleet.run_dir)
        fleet.start()
        watch = DrillWatch(site, _PATIENCE_S)
        is_moving = watch.updates(3)
        _keep_history(fleet)
        began_s = time.time()
        if is_moving:
            struck = _strike_all(planned(seed, minutes), site, watch, began_s, times)
        while not fleet.is_over():
            if not watch.updates(1):
                site.events.append(Stalled(f"the run did not end: no update for {_PATIENCE_S:g} s"))
                break
            _take(fleet, times)
        _take(fleet, times)
        ended_s = min(max(times.values(), default=began_s), began_s + 60.0 * minutes)
        effective = EffectiveTimeReader(fleet.run_dir).read()
        repairs, _ = read_repairs(fleet.run_dir)
        conclude(site)
        fleet.close()
        site.events += witness.close()
    _, violations = judge(site)
    after_s = _usual_s(seed, settings, baseline_s)
    usual_s = fmean((before_s, after_s))
    at_s = sorted(each - began_s for each in times.values())
    num_made = sum(0.0 < each <= ended_s - began_s for each in at_s)
    faults = with_costs(struck, at_s, ended_s - began_s, usual_s)
    found = _record(seed, minutes, settings, (before_s, after_s), ended_s - began_s, num_made, faults, violations,
                    effective, repairs, site.notes, load)  # fmt: skip
    if not violations:
        fleet.remove()
    return found, folder if violations else None


def _record(
    seed: int, minutes: float, settings: Sequence[str], usual_s: tuple[float, float], wall_s: float, num_updates: int,
    faults: Sequence[SoakFault], violations: Sequence[Violation], effective: EffectiveTime | None,
    repairs: Sequence[RepairRow], notes: Sequence[str], load: float,
) -> SoakRecord:  # fmt: skip
    return SoakRecord(
        seed, minutes, tuple(settings), (round(usual_s[0], 4), round(usual_s[1], 4)), round(wall_s, 2), num_updates,
        tuple(faults), tuple(violations), effective and effective.by_steps, effective and effective.by_device,
        tuple(round(row.whole_s, 2) for row in repairs), tuple(notes), (round(load, 2), round(os.getloadavg()[0], 2)),
    )  # fmt: skip


def _strike_all(
    faults: Sequence[tuple[float, PlannedFault]], site: Site, watch: DrillWatch, began_s: float, times: dict[int, float]
) -> list[SoakFault]:
    """Carry the faults out at their times, as long as the run is not over."""
    struck = list[SoakFault]()
    with progress("faults", total=len(faults), unit="faults") as bar:
        for at_s, fault in faults:
            while time.time() < began_s + at_s and not site.fleet.is_over():
                watch.look()
                _take(site.fleet, times)
                time.sleep(0.05)
            if site.fleet.is_over():
                site.notes.append(f"the run was over before {len(faults) - len(struck)} of the faults")
                break
            begun_s = time.time() - began_s
            one = Striking(fault, site)
            for _ in each_turn(_LONGEST_S):
                watch.look()
                if one.is_over:
                    break
            one.end()
            _keep_history(site.fleet)
            struck.append(SoakFault(str(fault.kind), one.target, round(begun_s, 2), round(time.time() - began_s, 2)))
            print(f"{begun_s:7.1f} s  {fault.kind} {one.target}", flush=True)
            bar.advance()
    return struck


def _take(fleet: DrillFleet, times: dict[int, float]) -> None:
    """Remember when each update was made for the first time."""
    for row in fleet.updates()[-50:]:
        times.setdefault(row.update, row.at_s)


# -- the report ------------------------------------------------------------------------------------


def table(record: SoakRecord) -> str:
    """Return what each kind of fault cost, as Markdown, and the sums."""
    by_kind = defaultdict[str, list[SoakFault]](list)
    for fault in record.faults:
        by_kind[fault.kind].append(fault)
    lines = [
        "| fault | number | lasted, mean (s) | updates' time lost, mean (s) | most (s) |",
        "|---|---:|---:|---:|---:|",
    ]
    for kind, faults in sorted(by_kind.items(), key=lambda item: -sum(fault.lost_s for fault in item[1])):
        lasted = fmean(fault.ended_s - fault.begun_s for fault in faults)
        lost = [fault.lost_s for fault in faults]
        lines.append(f"| {kind} | {len(faults)} | {lasted:.1f} | {fmean(lost):.1f} | {max(lost):.1f} |")
    return "\n".join(lines)


def spoken(record: SoakRecord) -> str:
    """Return the sums in words."""
    before_s, after_s = record.usual_s
    num_kinds = len({fault.kind for fault in record.faults})
    words = [
        f"{len(record.faults)} faults of {num_kinds} kinds in {record.wall_s / 60:.1f} min, {record.num_updates} updates",
        f"without faults an update takes {before_s:.3f} s before and {after_s:.3f} s after",
        f"rate kept: {record.kept:.3f} (bar {KEPT})",
    ]
    if record.by_steps is not None and record.by_device is not None:
        words.append(f"by its own records: {record.by_steps:.3f} by steps, {record.by_device:.3f} by device")
    if record.repair_s:
        words.append(
            f"{len(record.repair_s)} repairs, median {median(record.repair_s):.1f} s, longest {max(record.repair_s):.1f} s"
        )
    words += [f"note: {note}" for note in record.notes]
    words.append(f"{len(record.violations)} violations")
    words += [f"  {one.invariant}: {one.detail}" for one in record.violations]
    return "\n".join(words)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a soak; return 1 when something was violated or too little of the rate was kept."""
    parser = argparse.ArgumentParser(
        prog="python -m ops.drill.soak", description="One fleet under faults of all kinds, and the rate that it keeps."
    )
    parser.add_argument("--minutes", type=float, default=30.0, help="that the updates take without faults")
    parser.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    parser.add_argument("--set", action="append", default=[], metavar="SETTING=VALUE", help="of all three fleets")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the record")
    options = parser.parse_args(arguments)
    if not 0.0 < options.minutes < math.inf:
        raise ConfigError(f"--minutes is {options.minutes:g}; expected a finite number above 0")
    os.chdir(ROOT)
    record, folder = soak(options.seed, options.minutes, options.set)
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(asdict(record) | {"kept": round(record.kept, 4)}, indent=1) + "\n")
    print(f"\n{table(record)}\n\n{spoken(record)}")
    if folder is not None:
        print(f"folder: {folder}; again: python -m ops.drill.soak --seed {options.seed} --minutes {options.minutes:g}")
    return int(bool(record.violations) or record.kept < KEPT)


if __name__ == "__main__":
    sys.exit(exit_code(main))
