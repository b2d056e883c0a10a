"""A checkpoint's copy and the next update's memory."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from pipeline.fleet.limits import Limits
from pipeline.fleet.state import read_once
from pipeline.fleet.status import worker_rows
from pipeline.runtime.clock import RealClock
from pipeline.training.checkpoints import CheckpointFolder
from protocol.ids import Role
from tests.oracle.registry import MemoryRegistry
from tests.pipeline.ledger.builders import make_spec
from tests.pipeline.runtime.fakes import context_of, small_config
from tests.transports import zmq_transport
from workers.checkpoint_writer import CheckpointWriter

_COPY = 300 << 20


async def test_a_disk_that_refuses_a_checkpoint_is_in_the_heartbeat_until_one_is_written(tmp_path: Path) -> None:
    clock = RealClock()
    async with asyncio.TaskGroup() as tasks:
        settings = (small_config(tmp_path), tmp_path, Role.LEARNER, "learner", tasks)
        ctx = await context_of(*settings, MemoryRegistry(clock), zmq_transport(), clock)
        await ctx.ledger.open(make_spec())
        folder = CheckpointFolder(tmp_path / "checkpoints", owner=str(ctx.who), keep=2)
        folder.take_over()
        writer = CheckpointWriter(ctx, folder)
        is_full = True

        def save(where: Path) -> None:
            if is_full:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            (where / "file").write_bytes(b"weights")

        async def settle() -> None:
            pass

        await writer.write(1, lambda: save, {}, settle)
        await writer.wait()
        told = worker_rows(read_once([ctx.worker_state.heartbeat()], Limits(60.0, 100.0)))[0].refused
        assert str(tmp_path / "checkpoints") in told
        assert "No space left on device" in told
        is_full = False
        await writer.write(2, lambda: save, {}, settle)
        await writer.wait()
        assert ctx.worker_state.heartbeat().refused == ""
        folder.close()
        ctx.close()


@pytest.mark.parametrize(("free", "is_awaited"), [(_COPY // 2, True), (100 * _COPY, False)])
async def test_where_less_is_free_than_the_copy_took_nothing_is_begun_before_it_is_written(
    tmp_path: Path, free: int, is_awaited: bool
) -> None:
    clock, may_write = RealClock(), asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        settings = (small_config(tmp_path), tmp_path, Role.LEARNER, "learner", tasks)
        ctx = await context_of(*settings, MemoryRegistry(clock), zmq_transport(), clock)
        await ctx.ledger.open(make_spec())
        folder = CheckpointFolder(tmp_path / "checkpoints", owner=str(ctx.who), keep=2)
        folder.take_over()
        writer = CheckpointWriter(ctx, folder, free_bytes=lambda: free)

        def snapshot() -> Callable[[Path], None]:
            copy = np.ones(_COPY, np.uint8)

            def write(where: Path) -> None:
                (where / "file").write_bytes(copy[:8].tobytes())

            return write

        async def settle() -> None:
            await may_write.wait()

        writing = tasks.create_task(writer.write(1, snapshot, {}, settle))
        done, _ = await asyncio.wait({writing}, timeout=3.0)
        assert bool(done) is not is_awaited
        may_write.set()
        await writing
        await writer.wait()
        folder.close()
        ctx.close()
