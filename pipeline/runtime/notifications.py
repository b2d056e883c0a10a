"""Being told instead of asking: whoever waits for a change of the registry sleeps until there is
news of it.

*Consumes* the registry's news, on one connection that waits for it. *Produces* set events. *Waits
for* news, and for a server that is away; each wait has its time limit. *Unblocked by* whoever
changes something, or by that limit.

    learner announces ──> registry.news returns ──> the topic's bells are set ──> the waiter clears its bell and looks

A bell says that something may have changed, never what: the waiter reads that for itself. One ring
too many does no harm, and against one that is lost every waiter looks now and then although none
rang (``Clock.wait`` takes its limit).
"""

from __future__ import annotations

import asyncio
from typing import Final

from pipeline.runtime.clock import Clock
from pipeline.runtime.registry.contract import Registry, Topic
from protocol.errors import LedgerError

LOOK_ANYWAY_S: Final = 2.0
"""After so long a waiter looks although no bell rang: a server that lost its last writes may number
its news anew, and of a worker that fell silent nobody tells."""
_LISTEN_S: Final = 2.5
"""Half of what a client waits for an answer (``pipeline.ledger.redis.client``)."""
_AGAIN_S: Final = 1.0


class Notifications:
    """The bells of one process."""

    def __init__(self, registry: Registry, clock: Clock) -> None:
        self._registry = registry
        self._clock = clock
        self._bells: dict[Topic, list[asyncio.Event]] = {topic: [] for topic in Topic}

    def bell(self, topic: Topic) -> asyncio.Event:
        """Return an event for one waiter, which is set whenever there is news of ``topic``. Clear
        it before looking.
        """
        bell = asyncio.Event()
        self._bells[topic].append(bell)
        return bell

    async def watch(self) -> None:
        """Ring the bells until cancelled. A server that is away rings none: what waiters ask of it
        themselves tells them.
        """
        seen = dict.fromkeys(Topic, "")
        while True:
            try:
                found = await self._registry.news(seen, timeout_s=_LISTEN_S)
            except LedgerError:
                await self._clock.sleep(_AGAIN_S)
                continue
            seen |= found
            for topic in found:
                for bell in self._bells[topic]:
                    bell.set()
