"""The surroundings of an actor whose weights are measured: a real registry and transport, and an unused ledger."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import cast

import structlog
from structlog.typing import FilteringBoundLogger

from pipeline.config.load import read_resolved
from pipeline.ledger.redis.client import connect
from pipeline.ledger.redis.ledger import RedisLedger
from pipeline.ledger.server.embedded import read_ledger_url
from pipeline.runtime.clock import RealClock
from pipeline.runtime.context import ActorContext
from pipeline.runtime.registry.redis import RedisRegistry
from pipeline.runtime.worker_start import open_transport
from protocol.ids import Role

_SILENT_AFTER_S = 3600.0
"""No process sends heartbeats here, so every registered worker must count as alive."""


@asynccontextmanager
async def actor(run_dir: Path, role: Role, worker: str) -> AsyncIterator[tuple[ActorContext, ExitStack]]:
    """Act as a worker of the run in ``run_dir``, whose ledger server is running.

    The callbacks on the stack run after the spawned tasks have ended and before the transport closes, as a
    worker's teardown does."""
    config = read_resolved(run_dir)
    client, run = connect(read_ledger_url(run_dir)), config.run.name
    registry = RedisRegistry(client, run, unlisted_after_s=_SILENT_AFTER_S)
    who = await registry.register(role, worker)
    transport = open_transport(config, run_dir, who)
    try:
        async with asyncio.TaskGroup() as tasks:
            ctx = ActorContext(
                config=config,
                run_dir=run_dir,
                who=who,
                ledger=RedisLedger(client, run),
                registry=registry,
                transport=transport,
                log=cast("FilteringBoundLogger", structlog.get_logger()),
                clock=RealClock(),
                tasks=tasks,
            )
            with ExitStack() as teardown:
                teardown.callback(ctx.close)
                try:
                    yield ctx, teardown
                finally:
                    ctx.draining.set()
                    await ctx.cancel_spawned()
    finally:
        transport.close()
        await registry.aclose()
