"""Waiting with a deadline, where cancelling loses nothing.

A future carries no item. A woken waiter checks its condition and takes items in the same step in which it
returns, so a cancelled waiter never owns a message."""

from __future__ import annotations

import asyncio


class Waiters:
    """Tasks that wait for a condition, which each of them checks."""

    def __init__(self) -> None:
        self._futures: set[asyncio.Future[None]] = set()

    def __bool__(self) -> bool:
        return bool(self._futures)

    def wake(self) -> None:
        """Wake every waiter, to check its condition."""
        for future in self._futures:
            if not future.done():
                future.set_result(None)

    async def wait(self, timeout_s: float) -> None:
        """Return when woken, or after ``timeout_s``."""
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        self._futures.add(future)
        timer = loop.call_later(timeout_s, _finish, future)
        try:
            await future
        finally:
            timer.cancel()
            self._futures.discard(future)


def _finish(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
