"""Real fleets that are struck at given times, and the records of their repairs.

The models are emulated: decode steps and optimiser steps take set times. Processes, signals, ledger, messages,
snapshots and repairs are real. Only the injector knows the onset. The first updates, each repair and the end
have deadlines: a fleet that does not start is an error, a repair that does not come makes a trial without
times."""

from __future__ import annotations

import os
import random
import shutil
import signal
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

from ops.bench.recover.trials import RunRecord, Trial, committed, ended_unstruck, repaired, usual_seconds
from ops.drill.events import Lost
from ops.drill.fleet import DrillFleet, until
from ops.drill.witness import Witness
from pipeline.fleet.repair.records import RepairRow, read_repairs, read_steps
from protocol.errors import DataError
from protocol.ids import Role

FAULTS = {"kill": signal.SIGKILL, "freeze": signal.SIGSTOP}
ROLES = (Role.LEARNER, Role.GENERATOR, Role.REWARD, Role.REFERENCE, Role.VALUE)
SETTINGS = (
    "run.num_updates=1000000",
    "fleet.generator=8", "fleet.reward=2", "fleet.reference=2",
    "generation.num_slots=4", "engines.settings.decode_base_s=0.06", "engines.settings.step_s=0.6",
    "checkpoint.every_updates=20", "checkpoint.keep=2", "recovery.max_repairs=1000",
)  # fmt: skip
"""Overrides of ``configs/drill.toml``. Eight generators are a little faster than the learner needs. One worker is
struck again and again on purpose, so no number of losses evicts it."""
_CRITIC = ("algorithm.name=vapo", "algorithm.dynamic_sampling=false", "value.checkpoint_keep=2")
_STARTED_S = 90.0
_LATEST_S = 90.0
"""After the last fault's onset. A repair that has not come by then is missed."""
_END_S = 90.0
_KNOWN_S = 2.0
"""From a standby's report of readiness to its being known, at the latest."""
_POLL_S = 0.05
_READ_EVERY_S = 0.25
_FEWEST_UPDATES = 8
"""In the time without faults, for a median."""


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """One fleet, and when faults strike it."""

    label: str
    role: Role
    faults: tuple[str, ...]
    """Names in ``FAULTS``; each arrival draws one."""
    onsets: tuple[float, ...]
    """Seconds after the warm-up."""
    seed: int
    warm_s: float
    """Seconds without faults, before and again after them."""
    duration_s: float
    settings: tuple[str, ...] = ()
    """Overrides on top of ``SETTINGS``."""


@dataclass(slots=True)
class _Struck:
    trial: Trial
    is_repaired: bool = False


@dataclass(slots=True)
class _Seen:
    """Updates in the order in which they were made, including repeated ones."""

    updates: list[tuple[int, float]] = field(default_factory=list[tuple[int, float]])
    last_s: float = 0.0

    def poll(self, fleet: DrillFleet) -> None:
        """Read the new rows. A resumed learner removes rows, and adds others later."""
        for row in fleet.updates():
            if row.at_s > self.last_s:
                self.updates.append((row.update, row.at_s))
                self.last_s = row.at_s

    @property
    def newest(self) -> int:
        return max((update for update, _ in self.updates), default=0)

    def first_times(self) -> list[float]:
        """Return when each update was made for the first time, in order."""
        times, newest = list[float](), 0
        for update, at_s in self.updates:
            if update > newest:
                newest = update
                times.append(at_s)
        return times


def onsets(mean_s: float, seed: int, duration_s: float) -> tuple[float, ...]:
    """Return the arrivals of a Poisson process, in seconds from its begin."""
    rng = random.Random(f"gaps/{seed}")
    found, at_s = list[float](), rng.expovariate(1.0 / mean_s)
    while at_s < duration_s:
        found.append(at_s)
        at_s += rng.expovariate(1.0 / mean_s)
    return tuple(found)


def measure(plan: PlannedRun, on_trial: Callable[[Trial], None] = lambda _: None) -> RunRecord:
    """Run a fleet under a plan's faults; return its record.

    Raises:
        DataError: The fleet did not start, was too slow for a median, or ended by itself."""
    folder = Path(tempfile.mkdtemp(prefix="recover-"))
    critic = _CRITIC if plan.role is Role.VALUE else ()
    fleet = DrillFleet(folder, [*SETTINGS, f"run.seed={plan.seed}", *critic, *plan.settings])
    witness = Witness(fleet.run_dir)
    try:
        fleet.start()
        run = _StruckFleet(plan, fleet, on_trial)
        run.warm()
        run.strike_all()
        run.cool()
        balances = _ended_well(fleet)
    finally:
        fleet.close()
        events = witness.close()
    ahead_s = time.time() - time.monotonic()
    lost = [one for one in events if isinstance(one, Lost) and one.how == "worker_replaced"]
    replaced = [(one.at_s + ahead_s, one.worker, one.reason) for one in lost]
    found = run.record(replaced, balances=balances)
    shutil.rmtree(folder, ignore_errors=True)
    return found


class _StruckFleet:
    def __init__(self, plan: PlannedRun, fleet: DrillFleet, on_trial: Callable[[Trial], None]) -> None:
        self._plan, self._fleet, self._on_trial = plan, fleet, on_trial
        self._rng = random.Random(f"victims/{plan.seed}")
        self._seen = _Seen()
        self._open = list[_Struck]()
        self._done = list[Trial]()
        self._began_s = self._ended_s = self._usual_s = 0.0
        self._usual_ratio = 1.0
        self._rows = list[RepairRow]()
        self._next_read_s = 0.0
        self._num_left_out = 0

    def warm(self) -> None:
        """Wait for the first updates, and run without faults for a while. Raises DataError."""
        fleet = self._fleet
        if not until(lambda: fleet.updates() or fleet.is_over(), _STARTED_S, poll_s=0.2) or fleet.is_over():
            tail = fleet.output.read_text(errors="replace")[-2000:] if fleet.output.exists() else ""
            raise DataError(f"no update within {_STARTED_S:g} s of the start:\n{tail}")
        self._watch(self._plan.warm_s)
        self._began_s = time.time()

    def strike_all(self) -> None:
        """Strike at each arrival, and wait for the repairs. Raises DataError when the run ends."""
        waiting = deque(self._plan.onsets)
        while waiting or self._open or time.time() < self._began_s + self._plan.duration_s:
            now_s = time.time() - self._began_s
            if waiting and now_s >= waiting[0] and self._strike(waiting[0]):
                waiting.popleft()
            self._settle()
            last_s = max((each.trial.onset_s for each in self._open), default=now_s)
            if now_s > last_s + _LATEST_S or now_s > self._plan.duration_s + 2 * _LATEST_S:
                self._done += [each.trial for each in self._open]
                self._open.clear()
                if now_s > self._plan.duration_s:
                    break
            self._watch(_POLL_S)
        self._num_left_out = len(waiting)
        self._ended_s = time.time()
        self._seen.poll(self._fleet)

    def cool(self) -> None:
        """Run without faults once more: the fault-free figure is the mean of both medians, so a machine that
        becomes slower meanwhile counts half. Raises DataError."""
        self._watch(self._plan.warm_s)
        times = self._seen.first_times()
        before = [at_s for at_s in times if at_s <= self._began_s]
        after = [at_s for at_s in times if at_s > self._ended_s]
        if min(len(before), len(after)) < _FEWEST_UPDATES:
            had = f"{len(before)} updates before the faults and {len(after)} after them"
            raise DataError(f"{had}, in {self._plan.warm_s:g} s each; expected {_FEWEST_UPDATES}: make --warm longer")
        self._usual_s = fmean((usual_seconds(before), usual_seconds(after)))
        means_s = [(times[-1] - times[0]) / (len(times) - 1) for times in (before, after)]
        self._usual_ratio = self._usual_s / fmean(means_s)

    def _watch(self, seconds: float) -> None:
        ends_s = time.monotonic() + seconds
        while True:
            self._seen.poll(self._fleet)
            if self._fleet.is_over():
                raise DataError(f"the run ended under its faults: see {self._fleet.output}")
            left_s = ends_s - time.monotonic()
            if left_s <= 0.0:
                return
            time.sleep(min(_POLL_S, left_s))

    def _strike(self, due_s: float) -> bool:
        """Strike a working worker of the role; return False if there is none."""
        under_repair = {each.trial.target for each in self._open}
        at_work = [beat for beat in self._fleet.workers(self._plan.role) if beat.progress > 0]
        free = [beat for beat in at_work if beat.who.worker not in under_repair]
        if not free:
            return False
        beat = self._rng.choice(free)
        fault = self._rng.choice(self._plan.faults)
        self._seen.poll(self._fleet)
        load = round(os.getloadavg()[0], 2)
        onset_s = time.time() - self._began_s
        if not self._fleet.kill(beat.pid, FAULTS[fault]):
            return False
        put_off_s = round(onset_s - due_s, 3)
        trial = Trial(str(self._plan.role), fault, beat.who.worker, round(onset_s, 3), put_off_s, load=load)
        self._open.append(_Struck(trial))
        return True

    def _settle(self) -> None:
        """Complete the trials whose repair is on record; a learner's also needs its next committed update."""
        now_s = time.monotonic()
        if now_s >= self._next_read_s:
            self._next_read_s = now_s + _READ_EVERY_S
            self._rows, _ = read_repairs(self._fleet.run_dir)
        is_learner = self._plan.role is Role.LEARNER
        for each in list(self._open):
            if not each.is_repaired and (found := repaired(each.trial, self._began_s, self._rows)) is not None:
                each.trial, each.is_repaired = found, True
            if is_learner and each.trial.committed_s is None:
                found = committed(each.trial, self._began_s, self._seen.updates)
                each.trial = found or each.trial
            if each.is_repaired and not (is_learner and each.trial.committed_s is None):
                self._open.remove(each)
                self._done.append(each.trial)
                self._on_trial(each.trial)

    def record(self, replaced: Sequence[tuple[float, str, str]], *, balances: bool) -> RunRecord:
        """Return the run's record. ``replaced``: time, name and reason of the workers that the supervisor ended."""
        trials = tuple(sorted(self._done, key=lambda trial: trial.onset_s))
        evicted = [
            (row.at_s, row.worker, row.sentence)
            for row in read_steps(self._fleet.run_dir)
            if (row.rung, row.outcome) == ("evict", "begun")
        ]
        ended = [(at_s - self._began_s, worker, reason) for at_s, worker, reason in [*replaced, *evicted]]
        times = self._seen.first_times()
        num_updates = sum(self._began_s < at_s <= self._ended_s for at_s in times)
        return RunRecord(
            label=self._plan.label,
            role=str(self._plan.role),
            seed=self._plan.seed,
            settings=self._plan.settings,
            usual_s=round(self._usual_s, 4),
            wall_s=round(self._ended_s - self._began_s, 3),
            num_updates=num_updates,
            healthy=ended_unstruck(ended, trials),
            balances=balances,
            trials=trials,
            usual_ratio=round(self._usual_ratio, 4),
            notes=(*(f"evicted: {sentence}" for _, _, sentence in evicted), *self._left_out()),
        )

    def _left_out(self) -> Iterator[str]:
        if self._num_left_out:
            yield f"{self._num_left_out} arrivals struck nothing: too few workers were at work"


def _ended_well(fleet: DrillFleet) -> bool:
    """End the run, and return whether its ledger's audit balances."""
    fleet.command("down", str(fleet.run_dir), timeout_s=_END_S)
    until(fleet.is_over, _END_S, poll_s=0.2)
    audit = fleet.command("ledger", "audit", str(fleet.run_dir))
    return audit is not None and bool(audit["balances"])
