"""A run's host and a joining host in one process, over a real server and CURVE on the loopback."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.schema import RunConfig
from pipeline.ledger.redis.client import connect
from pipeline.ledger.redis.join_board import JoinBoard
from pipeline.runtime.registry.contract import RunState, RunStatus
from pipeline.runtime.registry.redis import RedisRegistry
from pipeline.supervisor.joining.join import JoinRequest, join
from pipeline.supervisor.joining.joined_folder import JoinedFolder, claimed_folder
from pipeline.supervisor.joining.joined_hosts import JoinedHosts
from pipeline.supervisor.joining.joined_supervisor import JoinOutcome
from protocol.ids import Role
from tests.pipeline.op_config import op_config

TCP = ("wire.transport=tcp", "supervisor.preload=false", "supervisor.drain_timeout_s=2")


def fake_worker(script: str = "live") -> Any:
    def command(role: Role, run_dir: Path, name: str) -> list[str]:
        words = [sys.executable, "-m", "tests.pipeline.supervisor.fake_worker", str(role)]
        return [*words, "--run-dir", str(run_dir), "--name", name, "--script", script]

    return command


async def until(found: Callable[[], Awaitable[Any]]) -> Any:
    """Return the first true answer."""
    for _ in range(1200):
        if answer := await found():
            return answer
        await asyncio.sleep(0.05)
    raise AssertionError("it did not come within 60 s")


class Meeting:
    """A run, as its host serves it, and joins of it."""

    def __init__(self, config: RunConfig, folder: Path, url: str, client: Any) -> None:
        self.config, self.folder, self.url = config, folder, url
        self.run_dir, self.cache = config.run_dir, folder / "cache" / "headrace" / "files"
        self.registry = RedisRegistry(client, config.run.name)
        self.board = JoinBoard(client, config.run.name)
        self.joined: Path | None = None
        self.hosts = JoinedHosts(config, config.run_dir)

    async def set(self, state: RunState, detail: str = "") -> None:
        await self.registry.set_run_status(RunStatus(state, detail))

    async def end_soon(self, when: Callable[[], Awaitable[Any]]) -> None:
        """End the run once ``when()`` is true."""
        await until(when)
        await self.set(RunState.FINISHED, "by the test")

    def claimed(self, role: Role = Role.GENERATOR) -> Any:
        return claimed_folder(self.folder / "joined", self.config.run.name, role)

    async def join(
        self, place: JoinedFolder, *, script: str = "live", count: int = 1, command: Any = None, **changed: Any
    ) -> JoinOutcome:
        self.joined = place.path
        request = JoinRequest(self.url, self.config.run.name, place.role, count, wait_s=5.0)
        request = replace(request, **changed)
        async with asyncio.timeout(60):
            return await join(request, place, command=command or fake_worker(script))


@asynccontextmanager
async def meeting(folder: Path, url: str, monkeypatch: pytest.MonkeyPatch, *overrides: str) -> AsyncIterator[Meeting]:
    """Start a run's host over an emptied server. The cache is the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    (folder / "home").mkdir()
    config = op_config(folder / "home", *TCP, *overrides)
    (config.run_dir / "logs").mkdir(parents=True, mode=0o700)
    client = connect(url)
    await client.flushall()
    found = Meeting(config, folder, url, client)
    await found.set(RunState.RUNNING)
    try:
        with found.hosts.served(url):
            yield found
    finally:
        await found.registry.aclose()
        await found.board.aclose()
