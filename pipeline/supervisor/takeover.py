"""How a new supervisor takes over the processes of an earlier one.

A process is adopted if it is the recorded one (process id and start time) and its worker's newest
incarnation, or not registered yet. A fenced one is killed: it was being replaced when its
supervisor died. An unrecorded worker of this host with a name of this fleet is fenced, and ends
because of that."""

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
from pipeline.supervisor.fleet_plan import Intervention, Verb
from pipeline.supervisor.host_fleet import HostFleet
from pipeline.supervisor.monitor import Monitor
from protocol.ids import ELASTIC_ROLES, Role

_OWN = re.compile(rf"supervisor|starter|{Role.LEARNER}|{Role.VALUE}|{Role.OBSERVER}|({'|'.join(ELASTIC_ROLES)})-\d+")

log = structlog.get_logger(__name__)


def may_adopt(epoch: int, newest: int) -> bool:
    """Return whether ``epoch`` (0: not registered) is the worker's newest incarnation."""
    return epoch in (0, newest)


def is_own(worker: str) -> bool:
    """Return whether the run's own supervisor gives such a name, rather than a joined host."""
    return _OWN.fullmatch(worker) is not None


def works_the_same(one: RunConfig, other: RunConfig) -> bool:
    """Return whether workers behave the same under both configurations; fleet size, supervision,
    recovery and sinks may differ."""
    kept = ("fleet", "supervisor", "recovery", "sinks")
    same = {name: getattr(other, name) for name in kept}
    return one.model_copy(update=same) == other


async def take_over(fleet: HostFleet, registry: Registry, ours: Callable[[str], bool] = is_own) -> list[str]:
    """Adopt running workers, kill fenced processes and fence stale workers; return the adopted.

    ``ours`` returns whether this supervisor gives such a name. Raises LedgerUnavailable,
    LaunchFailed."""
    processes, plan = fleet.processes, fleet.plan
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
            await fleet.executor.carry_out(registry, [Intervention(worker, Verb.FENCE)])
            log.info("stale_worker_fenced", worker=worker, pid=beat.pid)
    names = sorted({*adopted, *jobs})
    if names:
        log.warning("workers_adopted", workers=names)
    return names


# What a supervisor writes at its start, while commands may write at the same time.
#
# Nothing newer is overwritten: fleet and run state are compared and swapped. A ``headrace down``
# during a start wins. Commands that change the fleet wait until the state names this supervisor
# (``pipeline.operator.steering.check_running``).

_MAX_TRIES = 10


@asynccontextmanager
async def start_calls(
    config: RunConfig, run_dir: Path, monitor: Monitor, is_stopped: Callable[[], bool], *, answer_s: float
) -> AsyncIterator[tuple[RedisLedger, RedisRegistry]]:
    """Connect to the ledger for the start's calls, which wait for its server as long as workers do.

    The server may die meanwhile, and ``monitor`` restarts it. Calls raise Interrupted once
    ``is_stopped``, and whatever ``Monitor.keep_server`` raises."""
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
    """Set the configured fleet, with the run's evictions so far; return it. ``keeps``: leave an
    existing fleet as it is. Concurrent evictions and readmissions are respected."""
    for _ in range(_MAX_TRIES):
        before = await registry.fleet()
        fresh = carried_over(Fleet(dict(counts)), () if before is None else before.evictions)
        wanted = before if keeps and before is not None else fresh
        if await registry.replace_fleet(before, wanted):
            return wanted
    found = await registry.fleet()
    log.warning("fleet_kept", why="others kept changing it during the start")
    return found or Fleet(dict(counts))


async def set_running(registry: Registry, found: RunStatus) -> bool:
    """Set the run's state to running, unless ``headrace down`` was called during the start; return
    whether. ``found``: the state when the start began."""
    own = os.getpid()
    while not (found.state is RunState.STOPPING and found.supervisor == own):
        if await registry.replace_run_status(found, RunStatus(RunState.RUNNING, supervisor=own)):
            return True
        found = await registry.run_status()
    log.warning("supervisor_stopping", how=f"{found.detail}, during the start; no worker is started")
    return False
