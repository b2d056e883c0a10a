"""A run at work, as an operator's commands find it: tests that need another one make their own."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from pipeline.supervisor.run_folder import run_lock
from protocol.ids import Role
from tests.pipeline.operator.small_run import COUNTS, SmallRun, small_run


@pytest.fixture
async def run(tmp_path: Path) -> AsyncIterator[SmallRun]:
    run = await small_run(tmp_path, fleet=COUNTS)
    for role, name in ((Role.LEARNER, "learner"), (Role.GENERATOR, "generator-0"), (Role.REWARD, "reward-0")):
        await run.beat(role, name, epoch=3)
    with run_lock(run.run_dir):
        yield run
