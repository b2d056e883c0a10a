"""The repairs of one run: reports symptoms to the escalation, turns its orders into interventions,
and records its steps.

The supervisor's loop calls it twice a second with heartbeats. It reads the plan and the observer's
incidents. Its orders become interventions (``executor``), evictions in the desired fleet, or the
end of the run. Its steps are lines of ``repairs.jsonl``. An order that the registry did not accept
is retried at the next poll.

Without an observer there are no incidents; everything else works the same. An incident from before
this supervisor's start counts once it has news."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import msgspec
import structlog

from pipeline.config.schema import RunConfig
from pipeline.fleet.incidents.records import RunIncidents
from pipeline.fleet.repair.budgets import past_repairs
from pipeline.fleet.repair.escalation import Escalation, IncidentSign
from pipeline.fleet.repair.levels import (
    Abilities,
    Member,
    RepairLevel,
    RepairOrder,
    StepOutcome,
)
from pipeline.fleet.repair.records import StepRow, read_steps
from pipeline.fleet.state import Worker
from pipeline.process.exit_codes import ExitCode
from pipeline.runtime.registry.contract import Eviction, Fleet, Registry, WaitingFor
from pipeline.runtime.registry.settings_change import SettingsChange
from pipeline.runtime.registry.waits import Stage
from pipeline.supervisor.code_keeper import CodeKeeper
from pipeline.supervisor.fleet_edits import BY_SUPERVISOR, edit_fleet, evicted
from pipeline.supervisor.fleet_plan import FleetFailure, Intervention, Verb, WorkerPhase
from pipeline.supervisor.host_fleet import HostFleet
from pipeline.supervisor.self_checking import SelfChecking
from protocol.ids import Role

_ENDING: Final = frozenset({RepairLevel.RESTART, RepairLevel.REPLACE, RepairLevel.ROLE_RESTART, RepairLevel.ROLLBACK})
"""Levels that kill processes, whose stacks are read first."""
_AN_HOUR_S: Final = 3600.0
"""A change older than this is not rolled back as a repair."""

log = structlog.get_logger(__name__)


def made_escalation(config: RunConfig, run_dir: Path) -> Escalation:
    """Build a run's escalation policy; cases and budgets continue from earlier supervisors."""
    settings = config.recovery
    try:
        steps = read_steps(run_dir)
    except OSError as error:
        log.warning("steps_not_read", reason=str(error))
        steps = []
    next_case = max((row.case for row in steps), default=0) + 1
    escalation = Escalation(settings, config.restart_timeout_s, next_case=next_case)
    escalation.recall(time.monotonic(), past_repairs(steps, time.time(), settings.window_s))
    return escalation


class RepairPolicy:
    def __init__(self, escalation: Escalation, fleet: HostFleet, run_dir: Path, code: CodeKeeper | None = None) -> None:
        """``code``: rolls changes back; without it there are no rollbacks."""
        self._escalation, self._fleet, self._run_dir, self._code = escalation, fleet, run_dir, code
        self._incidents = RunIncidents(run_dir)
        self._checking = SelfChecking()
        self._since_s = time.time()
        self._orders: deque[RepairOrder] = deque()
        self._fenced: dict[str, int] = {}
        """Epochs of isolated workers' fences. A later epoch means a new start, on a joined host
        too."""
        self._seen: dict[str, Member] = {}
        """The roster of the last poll."""
        self._moved: dict[str, tuple[int, ...]] = {}
        """When workers under repair last made progress, on the supervisor's clock."""

    async def poll(self, registry: Registry, beats: Sequence[Worker], now: float) -> None:
        """Read the symptoms, and carry out what the policy orders. Raises LedgerUnavailable."""
        if any(beat.who.role is Role.OBSERVER and not beat.is_silent for beat in beats):
            self._escalation.see_incidents(now, await asyncio.to_thread(self._open_incidents))
        else:
            self._escalation.reset_timers(now, only_incidents=True)
        if (found := self._checking.read_answers(beats, now)) is not None:
            self._escalation.checked(now, *found)
        self._report_recovered(beats, now)
        standbys = self._fleet.standbys
        roles = frozenset[Role]() if standbys is None else standbys.roles
        changed = frozenset(role for role in Role if self._newest_change(role) is not None)
        no_check = self._checking.lack(beats, now)
        abilities = Abilities(standby_roles=roles, rollback_roles=changed, no_self_check=no_check)
        self._orders += self._escalation.tick(now, self._roster(beats), abilities)
        await self.record()
        ended = {worker for order in self._orders if order.level in _ENDING for worker in order.workers}
        stands = await self._fleet.stands(ended)
        while self._orders:
            wanted = await self._interventions(registry, self._orders[0], now, stands)
            epochs = await self._fleet.executor.carry_out(registry, wanted)
            if self._orders.popleft().level in _ENDING:
                self._fenced |= epochs
        await self.record()

    # -- symptoms ----------------------------------------------------------------------------------

    def _open_incidents(self) -> dict[int, IncidentSign]:
        try:
            found = self._incidents.read()
        except OSError as error:
            log.warning("incidents_not_read", reason=str(error))
            return {}
        return {
            one.number: IncidentSign(
                one.number,
                one.component,
                one.kinds[-1] if one.kinds else "",
                one.sentence,
                max(0.0, one.opened_s - one.since_s),
                one.is_quiet,
                one.found_s,
            )
            for one in found
            if one.is_open and one.records[-1].at_s >= self._since_s
        }

    def _report_recovered(self, beats: Sequence[Worker], now: float) -> None:
        pids = self._fleet.processes.pids
        for beat in beats:
            worker = beat.who.worker
            if worker in self._fenced and beat.who.epoch > self._fenced[worker]:
                del self._fenced[worker]
                self._escalation.started(now, worker)
        repaired = {case.worker for case in self._escalation.cases if case.is_repairing and not case.is_down}
        for beat in beats:
            worker = beat.who.worker
            if worker not in repaired or pids.get(worker, beat.pid) != beat.pid or beat.is_silent:
                continue
            if _is_at_work(beat):
                self._escalation.works(now, worker)
            elif self._moved.get(worker) != (moved := (beat.progress, beat.work.steps, beat.begun)):
                self._moved[worker] = moved
                self._escalation.moved(now, worker)
        self._moved = {worker: moved for worker, moved in self._moved.items() if worker in repaired}

    def _roster(self, beats: Sequence[Worker]) -> dict[str, Member]:
        there = {beat.who.worker: beat for beat in beats}
        pids, roster, before = self._fleet.processes.pids, dict[str, Member](), self._seen
        for worker in self._fleet.plan.workers:
            if worker.phase is not WorkerPhase.DRAINING:
                beat = there.get(worker.name)
                last = before.get(worker.name, Member(worker.role))
                if beat is not None and pids.get(worker.name) in (beat.pid, 0):
                    roster[worker.name] = _member(beat, last)
                else:
                    roster[worker.name] = replace(last, is_at_work=False)
        known = {worker.name for worker in self._fleet.plan.workers}
        for name, beat in there.items():
            if name not in known:
                roster[name] = _member(beat, before.get(name, Member(beat.who.role, is_guest=True)))
        # a fence removes a guest's heartbeat; keep the guest until its next start
        cases = {case.worker for case in self._escalation.cases}
        self._fenced = {name: epoch for name, epoch in self._fenced.items() if name in cases}
        for name in self._fenced.keys() & before.keys() - known - there.keys():
            roster[name] = replace(before[name], is_at_work=False, is_away=True)
        self._seen = roster
        return roster

    # -- orders ------------------------------------------------------------------------------------

    async def _interventions(
        self, registry: Registry, order: RepairOrder, now: float, stands: Mapping[str, Sequence[str]]
    ) -> list[Intervention]:
        """Return what an order does to workers, once it has changed the desired fleet or settings."""
        match order.level:
            case RepairLevel.RESTART | RepairLevel.REPLACE | RepairLevel.ROLE_RESTART:
                return self._restarts(order, stands)
            case RepairLevel.SELF_CHECK:
                if not await self._checking.begin(registry, now):
                    self._escalation.failed(now, order, "others kept changing the desired fleet")
            case RepairLevel.EVICT:
                if await self._evict(registry, order):
                    guests = [worker for worker in order.workers if worker not in self._fleet.processes.pids]
                    return [Intervention(worker, Verb.FENCE) for worker in guests]
                self._escalation.failed(now, order, "others kept changing the desired fleet")
            case RepairLevel.ROLLBACK:
                # undo the newest change that concerns the worker, and restart the sick workers
                change = self._newest_change(self._fleet.plan.role_of(order.worker))
                why = f"{order.worker} does not come back: {order.reason}"
                if change is not None and self._code is not None and await self._code.undo(registry, change, why):
                    return self._restarts(order, stands)
                self._escalation.failed(now, order, "there is no change left to roll back")
            case RepairLevel.WHOLE_RUN:
                plan, reason = self._fleet.plan, f"does not come back: {order.reason}; every level before was tried"
                plan.failure = plan.failure or FleetFailure(order.worker, ExitCode.STUCK, reason)
            case _:
                self._escalation.failed(now, order, "it is not available")
        return []

    def _newest_change(self, role: Role | None) -> SettingsChange | None:
        """Return the newest change of settings or code that may have broken a role's workers."""
        return None if self._code is None or role is None else self._code.newest(time.time() - _AN_HOUR_S, role)

    def _restarts(self, order: RepairOrder, stands: Mapping[str, Sequence[str]]) -> list[Intervention]:
        stood_s = order.detect_s + order.localise_s
        return [
            self._fleet.to_replace(
                worker, order.reason, stood_s=stood_s, localise_s=order.localise_s, stands=stands.get(worker, ()),
                has_case=True,
            )
            for worker in order.workers
        ]  # fmt: skip

    async def _evict(self, registry: Registry, order: RepairOrder) -> bool:
        """Add an eviction to the desired fleet. Returns False if others kept changing it."""
        at_s, role_of = time.time(), self._fleet.plan.role_of

        def change(fleet: Fleet) -> Fleet:
            if order.host:
                return evicted(fleet, Eviction("", order.host, order.reason, BY_SUPERVISOR, at_s))
            for worker in order.workers:
                fleet = evicted(fleet, Eviction(worker, "", order.reason, BY_SUPERVISOR, at_s), role_of(worker))
            return fleet

        return await edit_fleet(registry, change) is not None

    # -- the record --------------------------------------------------------------------------------

    async def record(self) -> None:
        steps = [msgspec.structs.replace(step, at_s=time.time()) for step in self._escalation.taken_steps()]
        for step in steps:
            _tell(step)
        await self._fleet.executor.record(steps)


def _member(beat: Worker, last: Member) -> Member:
    """Describe a worker by its heartbeat. ``last``: from the last poll, since a young process may
    not report its devices yet."""
    is_at_work = not beat.is_silent and beat.progress > 0 and _is_at_work(beat)
    devices = frozenset(beat.vitals.gpus) if beat.vitals is not None else frozenset[str]()
    return replace(last, host=beat.host, is_at_work=is_at_work, devices=devices or last.devices, is_away=False)


def _is_at_work(beat: Worker) -> bool:
    """Return whether a worker has begun its work: it made progress, or waits for others to give it some."""
    at = beat.waiting_for
    waits = at.stage in (Stage.IDLE, Stage.HELD_UP)
    return at is not WaitingFor.QUARANTINE and at.is_in_service and (waits or beat.progress > 0)


def _tell(step: StepRow) -> None:
    """Log a step: an eviction or the run's end as error, advice and refusals as warnings."""
    is_grave = step.rung in (RepairLevel.EVICT, RepairLevel.WHOLE_RUN) and step.outcome == StepOutcome.BEGUN
    warns = step.outcome in (StepOutcome.ADVISED, StepOutcome.REFUSED)
    log_at = log.error if is_grave else log.warning if warns else log.info
    fields = {"worker": step.worker, "case": step.case, "rung": str(step.rung), "outcome": str(step.outcome)}
    log_at("repair_step", **fields, why=step.sentence)
