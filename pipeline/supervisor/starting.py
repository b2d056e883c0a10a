"""What a supervisor writes at its start, beside commands that may write at the same time.

Nothing newer is overwritten: the fleet and the run's state are replaced only as they were read. A
``headrace down`` that meets a start wins. Commands that change the fleet are told to wait until the
state names this supervisor (``pipeline.operator.steering.check_running``)."""

from __future__ import annotations

import os
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
from pipeline.supervisor.evictions import carried_over
from pipeline.supervisor.monitor import Monitor
from protocol.ids import Role

_MAX_TRIES = 10

log = structlog.get_logger(__name__)


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
