"""Numbers by which the ledger's server recognises a repeated request.

A request waits for the answer to the incarnation's request before, so that later ones have higher
numbers.

If a reply is lost with its connection, the client sends the request again. A connection that was
given up may still deliver its copy much later. The server keeps the last number of each kind and
its answer (``scripts/parts/requests.lua``). The same number gets the same answer; a lower one is
refused."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager


class Requests:
    """The numbers of one incarnation's requests.

    They grow while the incarnation lives, across objects of this class: they begin at the clock's
    microseconds. A clock that is set back does not make them smaller."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._last = 0
        self._unanswered: dict[str, int] = {}

    @contextmanager
    def number(self, name: str = "") -> Generator[int]:
        """Yield a number. A named request ends only with an answer. After a lost or cancelled one
        the next of that name gets its number, so the server repeats the answer."""
        self._last = max(self._last + 1, time.time_ns() // 1000)
        number = self._unanswered.pop(name, self._last)
        answered = False
        try:
            yield number
            answered = True
        finally:
            if name and not answered:
                self._unanswered[name] = number

    @asynccontextmanager
    async def one_at_a_time(self, name: str = "") -> AsyncGenerator[int]:
        """Yield a number for a request that gives out or takes back; they take turns."""
        async with self._lock:
            with self.number(name) as number:
                yield number
