"""A new supervisor takes over the processes of an earlier one.

A process is adopted when it is the recorded one (process id and start time) and its worker's newest
incarnation, or not registered yet. A fenced one is killed: it was being replaced when its
supervisor died. An unrecorded worker of this host that has a fleet's name is fenced, and ends by
itself."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Callable

import structlog

from pipeline.config.schema import RunConfig
from pipeline.runtime.registry.contract import Registry
from pipeline.supervisor.fleet_plan import FleetPlan
from pipeline.supervisor.processes import Processes
from protocol.ids import ELASTIC_ROLES, Role

_OWN = re.compile(rf"supervisor|starter|{Role.LEARNER}|{Role.VALUE}|{Role.OBSERVER}|({'|'.join(ELASTIC_ROLES)})-\d+")

log = structlog.get_logger(__name__)


def may_adopt(epoch: int, newest: int) -> bool:
    """Whether ``epoch`` (0: not registered) is the worker's ``newest`` incarnation."""
    return epoch in (0, newest)


def is_own(worker: str) -> bool:
    """Whether a name is one that the run's own supervisor gives."""
    return _OWN.fullmatch(worker) is not None


def works_the_same(one: RunConfig, other: RunConfig) -> bool:
    """Whether workers of both configurations work alike; fleet size, supervision, recovery and
    sinks may differ."""
    kept = ("fleet", "supervisor", "recovery", "sinks")
    same = {name: getattr(other, name) for name in kept}
    return one.model_copy(update=same) == other


async def take_over(
    processes: Processes, plan: FleetPlan, registry: Registry, ours: Callable[[str], bool] = is_own
) -> list[str]:
    """Adopt running workers and end fenced ones; return the adopted. Raises LedgerUnavailable,
    LaunchFailed.
    ``ours`` returns whether a name is one that this supervisor gives."""
    adopted: dict[str, int] = {}
    jobs = await asyncio.to_thread(processes.adopt_jobs)
    for worker, role in jobs.items():
        plan.adopt(worker, role)
    for found in processes.find():
        if may_adopt(found.epoch, await registry.epoch(found.worker)):
            if processes.adopt(found):
                plan.adopt(found.worker, found.role)
                adopted[found.worker] = found.pid
        else:
            log.warning("fenced_process_ended", worker=found.worker, pid=found.pid, epoch=found.epoch)
            processes.end(found)
    for beat in await registry.heartbeats():
        worker = beat.who.worker
        is_adopted = adopted.get(worker) == beat.pid or worker in jobs
        if beat.host == socket.gethostname() and ours(worker) and not is_adopted:
            await registry.fence(worker)
            log.info("stale_worker_fenced", worker=worker, pid=beat.pid)
    names = sorted({*adopted, *jobs})
    if names:
        log.warning("workers_adopted", workers=names)
    return names
