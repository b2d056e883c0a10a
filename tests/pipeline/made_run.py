"""Runs without workers: a folder, its settings, and an embedded ledger with something in it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

from pipeline.config.load import write_resolved
from pipeline.ledger.server.embedded import EmbeddedServer, open_ledger
from pipeline.ledger.types import LedgerSpec
from pipeline.operator.attached import Attached, attach
from pipeline.preflight.checks import preflight
from pipeline.runtime.registry.contract import RunState, RunStatus
from pipeline.supervisor.run_folder import prepare_run_dir
from tests.pipeline.op_config import op_config


def made_run(folder: Path, *overrides: str) -> tuple[Path, LedgerSpec, EmbeddedServer]:
    """Make a run of ``op_config``; return its folder, the specification of its ledger, and its
    server, which is there."""
    config = op_config(folder, *overrides)
    spec = preflight(config).spec
    run_dir = prepare_run_dir(config, resume=False)
    write_resolved(config, run_dir)
    server = open_ledger(run_dir, configured_url=None, max_memory_mb=64)
    assert server is not None
    return run_dir, spec, server


def stopped_run(folder: Path, leave: Callable[[Attached], Awaitable[None]]) -> Path:
    """Make a run that was stopped and has no server, after ``leave`` has written to its ledger;
    return its folder."""
    run_dir, spec, server = made_run(folder)
    server.stop()

    async def leave_behind() -> None:
        async with attach(run_dir) as at:
            await at.ledger.open(spec)
            await at.registry.set_run_status(RunStatus(RunState.STOPPING, "stopped"))
            await leave(at)

    asyncio.run(leave_behind())
    return run_dir
