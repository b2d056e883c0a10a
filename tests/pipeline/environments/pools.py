"""A pool of environment processes for a test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from pipeline.config.rewards import EnvironmentSection
from pipeline.environments.processes import EnvironmentPool


@asynccontextmanager
async def pool_of(**settings: Any) -> AsyncIterator[EnvironmentPool]:
    async with asyncio.TaskGroup() as tasks:
        made = EnvironmentPool(EnvironmentSection.model_validate(settings), tasks.create_task)
        try:
            yield made
        finally:
            await made.aclose()
