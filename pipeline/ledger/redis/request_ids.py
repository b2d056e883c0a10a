"""Numbers by which the ledger's server knows a request that it has answered already.

*Consumes* calls of one incarnation that give something out or take it back. *Produces* a number for
each. *Waits for* the answer to the one before, so that what is asked next is numbered higher than
what was answered before. Unblocked by the server.

A reply can be lost with its connection, and the client then sends the same request again; a
connection that was given up may still deliver its copy much later. The server keeps the last number
of each kind and its answer (``scripts/parts/requests.lua``): the same number again gets the same
answer, a lower one is refused.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager


class Requests:
    """The numbering of one incarnation's requests.

    Numbers grow for as long as an incarnation lives, also from one object of this class to the
    next: they begin at the microseconds of the clock, and a clock that is set back does not make
    them smaller.
    """

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._last = 0
        self._unanswered: dict[str, int] = {}

    @contextmanager
    def number(self, name: str = "") -> Generator[int]:
        """Yield a number. Only an answer ends a request that has a name: after a lost or cancelled
        one the next of that name asks with the same number, and the server repeats what it gave."""
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
        """Yield a number for a request that gives out or takes back; no other such request is under
        way meanwhile.
        """
        async with self._lock:
            with self.number(name) as number:
                yield number
