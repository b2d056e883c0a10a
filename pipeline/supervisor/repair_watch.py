"""Follows each lost worker until its successor works. Pure: it is told of losses, starts and
heartbeats, with times of the supervisor's monotonic clock."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pipeline.fleet.repair.records import RepairRow
from pipeline.fleet.state import Worker
from pipeline.runtime.registry.contract import WaitingFor
from protocol.ids import Role


@dataclass(slots=True)
class _OpenRepair:
    role: Role
    cause: str
    onset_s: float
    detected_s: float
    """When the decision to repair it was made."""
    localise_s: float
    version: int
    """Highest version that the lost learner had published."""
    started_s: float | None = None
    standby: str = ""
    ready_s: float | None = None
    num_losses: int = 1


class RepairWatch:
    def __init__(self) -> None:
        self._open: dict[str, _OpenRepair] = {}
        self._versions: dict[str, int] = {}

    def lost(
        self, worker: str, role: Role, cause: str, now_s: float, *, stood_s: float = 0.0, localise_s: float = 0.0
    ) -> None:
        """Record a process that was lost, or is killed for an incident. Of several losses before a
        successor works, the first counts.

        Args:
            worker: Its name.
            role: Its role.
            cause: Why, in words.
            now_s: The supervisor's time.
            stood_s: Time since its last progress, or since the incident's fault began.
            localise_s: The part of ``stood_s`` between the first symptom and this decision."""
        before = self._open.get(worker)
        if before is None:
            version = self._versions.get(worker, -1)
            self._open[worker] = _OpenRepair(role, cause, now_s - stood_s, now_s, localise_s, version)
        elif before.started_s is not None:
            before.started_s = before.ready_s = None
            before.num_losses += 1

    def is_open(self, worker: str) -> bool:
        """Return whether a worker was lost and no successor works yet."""
        return worker in self._open

    def started(self, worker: str, now_s: float, standby: str = "") -> None:
        """Record the start of a process, or that ``standby`` takes over. Ignored unless the worker
        was lost."""
        if (repair := self._open.get(worker)) is not None:
            repair.started_s, repair.ready_s, repair.standby = now_s, None, standby

    def left(self, worker: str) -> None:
        self._open.pop(worker, None)

    def observe(self, beats: Iterable[Worker], pids: Mapping[str, int], now_s: float, wall_s: float) -> list[RepairRow]:
        """Return the repairs completed by these heartbeats. ``pids``: processes held here, by
        worker."""
        done = list[RepairRow]()
        for beat in beats:
            worker = beat.who.worker
            if pids.get(worker) != beat.pid:
                continue
            repair = self._open.get(worker)
            if repair is not None and repair.started_s is not None and beat.waiting_for is not WaitingFor.STARTING:
                if repair.ready_s is None:
                    repair.ready_s = now_s
                if beat.progress > 0 and (repair.role is not Role.LEARNER or beat.policy_version > repair.version):
                    del self._open[worker]
                    done.append(_row(worker, repair, repair.started_s, repair.ready_s, now_s, wall_s))
            self._versions[worker] = max(self._versions.get(worker, -1), beat.policy_version)
        return done


def _row(worker: str, repair: _OpenRepair, started_s: float, ready_s: float, now_s: float, wall_s: float) -> RepairRow:
    return RepairRow(
        at_s=wall_s,
        worker=worker,
        role=str(repair.role),
        cause=repair.cause,
        detect_s=round(repair.detected_s - repair.onset_s - repair.localise_s, 3),
        replace_s=round(started_s - repair.detected_s, 3),
        reload_s=round(ready_s - started_s, 3),
        repeat_s=round(now_s - ready_s, 3),
        num_losses=repair.num_losses,
        localise_s=round(repair.localise_s, 3),
        standby=repair.standby,
    )
