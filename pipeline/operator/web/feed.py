"""The newest message about one run, for any number of pages.

A page that is slow misses messages and receives the newest one: nothing is queued."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FeedMessage:
    """One message, numbered from 1."""

    number: int
    body: bytes


class PageFeed:
    """Hands the newest message to all that wait for it, in one event loop."""

    def __init__(self) -> None:
        self._number = 0
        self._newest: FeedMessage | None = None
        self._came = asyncio.Event()
        self._is_closed = False

    def publish(self, body: bytes) -> None:
        """Replace the newest message."""
        self._number += 1
        self._newest = FeedMessage(self._number, body)
        self._came.set()
        self._came = asyncio.Event()

    def forget(self) -> None:
        """Have later readers wait for the next message: the newest is of an earlier time."""
        self._newest = None

    def close(self) -> None:
        """End all waits for good."""
        self._is_closed = True
        self._came.set()

    @property
    def is_closed(self) -> bool:
        """Whether no message will come."""
        return self._is_closed

    async def after(self, number: int, *, timeout_s: float) -> FeedMessage | None:
        """Return the newest message once it has a number above ``number``; None at the deadline
        and after the close."""
        if self._newest is None or self._newest.number <= number:
            if self._is_closed:
                return None
            try:
                async with asyncio.timeout(timeout_s):
                    await self._came.wait()
            except TimeoutError:
                return None
        found = self._newest
        return found if found is not None and found.number > number else None
