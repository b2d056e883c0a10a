"""Waiting with a deadline that loses nothing when it is cancelled.

*Consumes* wake-ups. *Produces* nothing: a waiter that wakes looks for itself. *Waits for* ``wake``
or its deadline.

Nothing is ever handed over inside a future. A waiter is only told to look again, and takes what it
finds in the same step in which it returns, so that there is no moment at which a cancelled waiter
owns a message.
"""

from __future__ import annotations

import asyncio


class Waiters:
    """Tasks that want to be told when to look again."""

    def __init__(self) -> None:
        self._futures: set[asyncio.Future[None]] = set()

    def __bool__(self) -> bool:
        return bool(self._futures)

    def wake(self) -> None:
        """Tell every waiter to look again."""
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
