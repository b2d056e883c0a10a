"""A new supervisor takes over the processes of an earlier one.

A process is adopted when it is the recorded one (process id and start time) and its worker's newest
incarnation, or not registered yet. A fenced one is killed: it was being replaced when its
supervisor died. An unrecorded worker of this host that has a fleet's name is fenced, and ends by
itself."""

from __future__ import annotations

import asyncio
import os
import re
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import structlog

from pipeline.config.schema import RunConfig
from pipeline.ledger.redis.client import connect
from pipeline.ledger.redis.ledger import RedisLedger
from pipeline.ledger.server.embedded import read_ledger_url
from pipeline.process.exit_codes import Interrupted
from pipeline.runtime.registry.contract import Fleet, Registry, RunState, RunStatus
from pipeline.runtime.registry.redis import RedisRegistry
from pipeline.supervisor.fleet_edits import carried_over
from pipeline.supervisor.fleet_plan import FleetPlan
from pipeline.supervisor.monitor import Monitor
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


# What a supervisor writes at its start, when commands may write at the same time.
#
# Nothing newer is overwritten: the fleet and the run's state are replaced only as they were read. A
# ``headrace down`` that meets a start wins. Commands that change the fleet are told to wait until the
# state names this supervisor (``pipeline.operator.steering.check_running``).

_MAX_TRIES = 10


@asynccontextmanager
async def start_calls(
    config: RunConfig, run_dir: Path, monitor: Monitor, is_stopped: Callable[[], bool], *, answer_s: float
) -> AsyncIterator[tuple[RedisLedger, RedisRegistry]]:
    """Connect for the start's calls. They wait for the ledger's server as long as workers do: it may
    die meanwhile, and ``monitor`` starts it again. Calls raise Interrupted once ``is_stopped``, and
    what ``Monitor.keep_server`` raises."""
    client = connect(read_ledger_url(run_dir), timeout_s=answer_s, patience_s=config.ledger.outage_timeout_s)
    ledger, registry = RedisLedger(client, config.run.name), RedisRegistry(client, config.run.name)

    def give_up(trouble: str) -> None:
        if trouble and is_stopped():
            raise Interrupted(f"stopped at the start, while the ledger's server was away: {trouble}")
        if trouble:
            monitor.keep_server()

    ledger.on_trouble(give_up)
    registry.on_trouble(give_up)
    try:
        yield ledger, registry
    finally:
        await ledger.aclose()
        await registry.aclose()


async def set_first_fleet(registry: Registry, counts: Mapping[Role, int], *, keeps: bool) -> Fleet:
    """Set the fleet as it is configured, with the run's evictions; return it. ``keeps``: a fleet
    that is there stays. A worker that is evicted or readmitted meanwhile is."""
    for _ in range(_MAX_TRIES):
        before = await registry.fleet()
        fresh = carried_over(Fleet(dict(counts)), () if before is None else before.evictions)
        wanted = before if keeps and before is not None else fresh
        if await registry.replace_fleet(before, wanted):
            return wanted
    found = await registry.fleet()
    log.warning("fleet_kept", why="others changed it again and again during the start")
    return found or Fleet(dict(counts))


async def set_running(registry: Registry, found: RunStatus) -> bool:
    """Set the run's state, unless ``headrace down`` was called during the start; return whether.
    ``found``: the state at the start's begin, which an earlier supervisor may have left."""
    own = os.getpid()
    while not (found.state is RunState.STOPPING and found.supervisor == own):
        if await registry.replace_run_status(found, RunStatus(RunState.RUNNING, supervisor=own)):
            return True
        found = await registry.run_status()
    log.warning("supervisor_stopping", how=f"{found.detail}, during the start; no worker is started")
    return False
