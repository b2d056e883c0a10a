"""Calls the user's code: coroutine functions on the event loop, others on threads."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any


async def call_user(threads: Executor, called: Callable[..., Any], *given: Any, **further: Any) -> Any:
    if inspect.iscoroutinefunction(called):
        return await called(*given, **further)
    running = asyncio.get_running_loop().run_in_executor(threads, lambda: called(*given, **further))
    try:
        found = await asyncio.shield(running)
    except asyncio.CancelledError:
        # a thread cannot be cancelled: without a reply the parent ends the process
        await asyncio.wait({running})
        raise
    return await found if inspect.isawaitable(found) else found
