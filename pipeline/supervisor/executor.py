"""Carries out interventions: the one place where running workers are started, drained, killed and
fenced, and where it is recorded why.

    fleet_plan, watchdog, desired fleet, code_keeper, repair_policy, standbys    decide, and act on nothing
        │ Intervention(worker, verb, reason)
        v
    Executor ──> processes (of this host, or a launcher's), standbys, fences
             ──> log and repairs.jsonl: one line for each intervention with a reason

An intervention without a reason is part of another one, or of the start or end of the fleet, and is
not recorded. A worker is fenced before it is killed, so that its late writes have no effect."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final

import structlog

from pipeline.fleet.repair.levels import StepOutcome
from pipeline.fleet.repair.records import RepairRow, StepRow, repair_records
from pipeline.runtime.registry.contract import Registry
from pipeline.supervisor.fleet_plan import Intervention, Verb
from pipeline.supervisor.processes import Processes

_FENCED: Final = frozenset({Verb.REPLACE, Verb.EXPEL, Verb.FENCE})
_KILLED: Final = frozenset({Verb.KILL, Verb.REPLACE, Verb.EXPEL})
_EVENTS: Final = {
    Verb.DRAIN: ("info", "worker_drained"),
    Verb.KILL: ("error", "worker_killed"),
    Verb.REPLACE: ("error", "worker_replaced"),
    Verb.EXPEL: ("warning", "worker_evicted"),
    Verb.FENCE: ("warning", "unmanaged_worker_fenced"),
}
"""Level and event of the log line."""

log = structlog.get_logger(__name__)


class Executor:
    def __init__(self, run_dir: Path, processes: Processes, begin: Callable[[Intervention], None]) -> None:
        """``begin``: starts a worker, by a standby or a process."""
        self._run_dir, self._processes, self._begin = run_dir, processes, begin
        self._rows: list[StepRow] = []
        """Not written yet."""

    async def carry_out(self, registry: Registry, interventions: Iterable[Intervention]) -> dict[str, int]:
        """Carry out interventions; return the epochs of fences by worker. Raises LedgerUnavailable:
        those from the first that could not be fenced on are left."""
        epochs: dict[str, int] = {}
        for one in interventions:
            if one.verb in _FENCED:
                epochs[one.worker] = await registry.fence(one.worker)
            self.act([one])
        await self.record()
        return epochs

    def act(self, interventions: Iterable[Intervention]) -> None:
        """Carry out interventions that need no ledger."""
        for one in interventions:
            if one.verb is Verb.START:
                self._begin(one)
            elif one.verb is not Verb.FENCE:
                self._processes.stop(one.worker, now=one.verb in _KILLED)
            if one.reason and one.verb is not Verb.START:
                self._note(one)

    async def record(self, steps: Sequence[StepRow] = (), repairs: Sequence[RepairRow] = ()) -> None:
        """Write steps, repairs and the interventions so far to ``repairs.jsonl``. The run does not
        depend on it: a failure is logged."""
        rows, self._rows = [*self._rows, *steps], []
        try:
            if rows or repairs:
                await asyncio.to_thread(repair_records(self._run_dir).append, *rows, *repairs)
        except OSError as error:
            log.warning("repairs_not_written", reason=str(error))

    def _note(self, one: Intervention) -> None:
        level, event = _EVENTS[one.verb]
        fields = {"stands": one.stands} if one.verb is Verb.REPLACE else {}
        getattr(log, level)(event, worker=one.worker, reason=one.reason, **fields)
        if not one.has_case:
            role = "" if one.role is None else str(one.role)
            self._rows.append(StepRow(time.time(), 0, one.worker, role, str(one.verb), StepOutcome.DONE, one.reason))
