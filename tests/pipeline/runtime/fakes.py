"""Surroundings for an actor under test: a configuration, a log, a context. Nothing here replaces a
real part."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import cast

import structlog
from structlog.typing import FilteringBoundLogger

from pipeline.config.runtime import CheckpointSection, LedgerSection, RunSection, SupervisorSection
from pipeline.config.schema import RunConfig
from pipeline.config.training import DataSection, ModelSection
from pipeline.runtime.clock import Clock
from pipeline.runtime.context import ActorContext, Transport
from pipeline.runtime.registry.contract import Registry
from protocol.ids import Role
from tests.oracle.ledger.ledger import MemoryLedger


def small_config(folder: Path, *, drain_timeout_s: float = 5.0, outage_timeout_s: float = 20.0) -> RunConfig:
    """A configuration whose model and data are never read."""
    return RunConfig(
        run=RunSection(name="runtime-test", dir=folder),
        model=ModelSection(path=folder / "no-model"),
        data=DataSection(train=(folder / "no-data.jsonl",)),
        ledger=LedgerSection(outage_timeout_s=outage_timeout_s),
        supervisor=SupervisorSection(drain_timeout_s=drain_timeout_s),
        checkpoint=CheckpointSection(snapshots="off"),
    )


async def context_of(
    config: RunConfig,
    run_dir: Path,
    role: Role,
    worker: str,
    tasks: asyncio.TaskGroup,
    registry: Registry,
    transport: Transport,
    clock: Clock,
) -> ActorContext:
    who = await registry.register(role, worker)
    return ActorContext(
        config=config,
        run_dir=run_dir,
        who=who,
        ledger=MemoryLedger(lambda _: who.epoch),
        registry=registry,
        transport=transport,
        log=cast("FilteringBoundLogger", structlog.get_logger("test")),
        clock=clock,
        tasks=tasks,
    )
