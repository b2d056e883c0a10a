"""Claims about the times of the learner's checkpoints."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace

from pipeline.config.running import CheckpointSection
from pipeline.runtime.registry.memory import MemoryRegistry
from protocol.ids import Role
from tests.manual_clock import ManualClock
from tests.pipeline.runtime.fakes import context_of, small_config
from tests.transports import zmq_transport
from workers.learner.learner import Learner


async def _learner(folder: Path, clock: ManualClock, tasks: asyncio.TaskGroup) -> Learner:
    settings = CheckpointSection(every_updates=10, every_s=300.0)
    config = small_config(folder).model_copy(update={"checkpoint": settings})
    transport = zmq_transport()
    ctx = await context_of(config, folder, Role.LEARNER, "learner", tasks, MemoryRegistry(clock), transport, clock)
    learner = Learner(ctx)
    learner._writer = SimpleNamespace(is_writing=False, last_s=0.0)  # pyright: ignore[reportAttributeAccessIssue]
    learner._has_checkpoint, learner._kept_s, learner._num_updates = False, clock.monotonic(), 1
    return learner


async def test_the_first_long_update_is_kept_at_once_and_a_short_one_is_not(tmp_path: Path) -> None:
    clock = ManualClock()
    async with asyncio.TaskGroup() as tasks:
        learner = await _learner(tmp_path, clock, tasks)
        await clock.advance(3.0)
        assert not learner._is_checkpoint_due(), "three seconds are soon made again"
        await clock.advance(30.0)
        assert learner._is_checkpoint_due()


async def test_later_ones_are_kept_by_number_or_time_and_no_more_often_than_writing_allows(tmp_path: Path) -> None:
    clock = ManualClock()
    async with asyncio.TaskGroup() as tasks:
        learner = await _learner(tmp_path, clock, tasks)
        learner._has_checkpoint = True
        await clock.advance(200.0)
        assert not learner._is_checkpoint_due()
        learner._num_updates = 10
        assert learner._is_checkpoint_due()
        learner._num_updates = 11
        await clock.advance(150.0)
        assert learner._is_checkpoint_due()
        learner._writer.last_s = 60.0
        assert not learner._is_checkpoint_due(), "writing would take a sixth of the time"
        await clock.advance(300.0)
        assert learner._is_checkpoint_due()
