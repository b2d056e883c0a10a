"""Several shards' calls at once, and calls that a shard which is away must not hold up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, Final, TypeVar

T = TypeVar("T")
_LOOK_S: Final = 0.05
"""Between two looks at whether a shard that gives no answer is away."""


async def together(calls: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Return all results in order. The first failure ends the others, and is raised itself.

    A cancelled call is repeated safely: the shard's own connection numbers it."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(call) for call in calls]
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]


class Unhindered:
    """Calls of one worker to shards that may be away, at most one of a kind to each.

    A call to a shard that is away goes on without its caller, within the connection's patience. The
    next call of its kind returns its answer, or raises its error. So work at other shards goes on,
    and nothing that the late answer gives is lost."""

    def __init__(self, is_away: Callable[[int], bool]) -> None:
        self._is_away = is_away
        self._under_way: dict[tuple[str, int], asyncio.Task[Any]] = {}

    async def call(self, kind: str, index: int, make: Callable[[], Coroutine[Any, Any, T]]) -> T | None:
        """Return the answer; None while the shard is away."""
        key = (kind, index)
        task = self._under_way.get(key)
        if task is None:
            task = self._under_way[key] = asyncio.get_running_loop().create_task(make())
        while not task.done():
            if self._is_away(index):
                return None
            await asyncio.wait({task}, timeout=_LOOK_S)
        del self._under_way[key]
        return task.result()

    async def aclose(self) -> None:
        """End all calls under way."""
        tasks = [*self._under_way.values()]
        self._under_way.clear()
        for task in tasks:
            task.cancel()
        if tasks:
            ended, _ = await asyncio.wait(tasks)
            # an error that no call takes note of any more
            _ = [task.exception() for task in ended if not task.cancelled()]
