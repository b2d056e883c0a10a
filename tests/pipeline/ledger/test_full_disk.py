"""A ledger server with a full disk: it is reported with its folder, and recovers."""

from __future__ import annotations

import asyncio
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from pipeline.ledger.redis.client import connect
from pipeline.ledger.redis.ledger import RedisLedger
from pipeline.ledger.server.embedded import EmbeddedServer
from pipeline.ledger.server.probe import ServerState, ServerWatch
from pipeline.runtime.registry.contract import RunState, RunStatus
from pipeline.runtime.registry.redis import RedisRegistry
from protocol.errors import LedgerDiskFailed, LedgerError


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Yield a run's folder whose ledger lies on a disk of 4 MB."""
    if os.geteuid() != 0:
        pytest.skip("only root may mount a small disk")
    folder = tmp_path / "run" / "ledger"
    folder.mkdir(parents=True, mode=0o700)
    command = ["mount", "-t", "tmpfs", "-o", "size=4m,mode=0700", "tmpfs", str(folder)]
    subprocess.run(command, check=True, timeout=30)
    try:
        yield folder.parent
    finally:
        command = ["umount", "-l", str(folder)]
        subprocess.run(command, check=True, timeout=30)


async def test_a_server_without_room_names_its_folder_until_there_is_room_again(small_disk: Path) -> None:
    server = EmbeddedServer(small_disk, max_memory_mb=64)
    server.start()
    client = connect(server.url)
    ledger, registry = RedisLedger(client, "full"), RedisRegistry(client, "full")
    ballast = small_disk / "ledger" / "ballast"

    async def until(folder: str | None) -> None:
        deadline = time.monotonic() + 20.0
        while await ledger.unwritten() != folder:
            assert time.monotonic() < deadline, f"expected {folder}"
            with suppress(LedgerError):
                await registry.set_run_status(RunStatus(RunState.RUNNING, "x" * 5000))
            await asyncio.sleep(0.02)

    try:
        await registry.set_run_status(RunStatus(RunState.RUNNING))
        assert await ledger.unwritten() is None
        with suppress(OSError):
            ballast.write_bytes(bytes(8 << 20))
        await until(str(small_disk / "ledger"))
        assert (await registry.run_status()).state is RunState.RUNNING, "what it has it still tells"
        ballast.unlink()
        await until(None)
        await registry.set_run_status(RunStatus(RunState.FINISHED))
    finally:
        await registry.aclose()
        await ledger.aclose()
        server.stop()


async def test_calls_wait_for_room_and_the_server_is_not_taken_for_dead(small_disk: Path) -> None:
    server = EmbeddedServer(small_disk, max_memory_mb=64)
    server.start()
    # patient with a busy machine, and less than with a server without room
    pid, watch = server.pid(), ServerWatch(patience_s=2.0)
    hasty = RedisRegistry(connect(server.url, patience_s=2.0), "full")
    patient = RedisRegistry(connect(server.url, patience_s=2.0, disk_patience_s=60.0), "full")
    ballast = small_disk / "ledger" / "ballast"
    with suppress(OSError):
        ballast.write_bytes(bytes(8 << 20))
    try:
        with pytest.raises(LedgerDiskFailed, match="Free space on its disk"):
            async with asyncio.timeout(20.0):
                while True:
                    await hasty.set_run_status(RunStatus(RunState.RUNNING, "x" * 5000))
        async with asyncio.TaskGroup() as tasks:
            waiting = tasks.create_task(patient.set_run_status(RunStatus(RunState.FINISHED)))
            for now_s in range(5):
                sight = await asyncio.to_thread(server.supervise, watch, float(now_s))
                assert (sight.state, sight.refuses_writes, sight.pid) == (ServerState.SERVES, True, pid)
                await asyncio.sleep(0.5)
            assert not waiting.done()
            ballast.unlink()
        assert (await hasty.run_status()).state is RunState.FINISHED
        assert server.pid() == pid
    finally:
        await hasty.aclose()
        await patient.aclose()
        server.stop()
