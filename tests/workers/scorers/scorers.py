"""Surroundings for a scorer under test: a ledger in memory, a clock driven by hand."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import cast

import structlog
from structlog.typing import FilteringBoundLogger

from pipeline.config.schema import RunConfig
from pipeline.ledger.types import LedgerSpec
from pipeline.runtime.context import ActorContext
from protocol.ids import Incarnation, Role
from protocol.trajectory import TrajectoryChunk
from tests.manual_clock import ManualClock
from tests.oracle.ledger.ledger import MemoryLedger
from tests.oracle.registry import MemoryRegistry
from tests.pipeline.ledger.builders import make_spec
from tests.transports import zmq_transport
from workers.scorers.reward import Reward


@asynccontextmanager
async def scorer_context(
    tmp_path: Path, config: RunConfig, role: Role, spec: LedgerSpec | None = None
) -> AsyncIterator[ActorContext]:
    """Open the surroundings of worker 0 of ``role``; without ``spec`` one failure of a chunk makes a dead letter."""
    clock = ManualClock()
    registry = MemoryRegistry(clock)
    ledger = MemoryLedger(lambda _: 1, clock.time)
    await ledger.open(spec or make_spec(max_attempts=1))
    who = Incarnation(role, f"{role.value}-0", 1)
    await registry.register(role, who.worker)
    transport = zmq_transport()
    async with asyncio.TaskGroup() as tasks:
        ctx = ActorContext(
            config=config,
            run_dir=tmp_path,
            who=who,
            ledger=ledger,
            registry=registry,
            transport=transport,
            log=cast("FilteringBoundLogger", structlog.get_logger("test")),
            clock=clock,
            tasks=tasks,
        )
        try:
            yield ctx
        finally:
            ctx.close()
            # it waits for libzmq's thread, so the next worker of the same name can bind
            transport.close()


async def judge_all(worker: Reward, chunks: list[TrajectoryChunk]) -> None:
    """Let a reward worker judge chunks by its own pieces, to their end."""
    async with asyncio.TaskGroup() as tasks:
        for piece in await worker._pieces(chunks):
            tasks.create_task(worker._judge(piece))
