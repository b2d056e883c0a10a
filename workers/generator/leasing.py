"""Leases for a generator, asked for while its engine decodes.

A request takes a round trip to the ledger. The decode loop does not wait for it: a slot that comes free
would else hold up the others each time. For slots that will be free by the time of an answer it asks
ahead, at the rate at which slots came free lately; so what is leased ahead waits a fraction of a second,
and is not kept from a generator that has a slot for it."""

from __future__ import annotations

import asyncio
from collections import deque

from pipeline.ledger.types import LeaseGrant
from pipeline.runtime.actor import ActorContext

_LEAST_PAUSE_S = 0.02
_MOST_PAUSE_S = 0.1
_AHEAD_S = 0.2
"""Leased ahead are as many as slots come free in this time."""
_NUM_ENDS = 16
"""Ends from which the rate is taken; with fewer nothing is leased ahead."""


class Backoff:
    """The pause before the next request to the ledger. It doubles after each refusal, because a
    waiting fleet would otherwise ask too often, and a notification resets it."""

    def __init__(self, *, least_s: float, most_s: float) -> None:
        self._least_s, self._most_s = least_s, most_s
        self._pause_s = least_s
        self._next_s = 0.0

    def refused(self, now_s: float) -> float:
        """Record a refusal; return the seconds until the next request."""
        pause_s = self._pause_s
        self._next_s = now_s + pause_s
        self._pause_s = min(2.0 * pause_s, self._most_s)
        return pause_s

    def reset(self) -> None:
        self._pause_s, self._next_s = self._least_s, 0.0

    def may_ask(self, now_s: float) -> bool:
        return now_s >= self._next_s


class Leasing:
    """At most one request for leases, beside the decode loop, which takes its answer."""

    def __init__(self, ctx: ActorContext) -> None:
        self._ctx = ctx
        self._credit = Backoff(least_s=_LEAST_PAUSE_S, most_s=_MOST_PAUSE_S)
        self._surplus = Backoff(least_s=_MOST_PAUSE_S, most_s=_AHEAD_S)
        self._ends_s: deque[float] = deque(maxlen=_NUM_ENDS)
        self._asking: asyncio.Task[None] | None = None
        self._grant: LeaseGrant | None = None

    @property
    def has_answer(self) -> bool:
        """Whether ``take`` has something; any thread may ask."""
        return self._grant is not None

    def slot_came_free(self) -> None:
        self._ends_s.append(self._ctx.clock.monotonic())

    def credit_came(self) -> None:
        """Ask again at once: a published version frees credit."""
        self._credit.reset()

    def ask(self, num_free_slots: int, policy_version: int) -> None:
        """Ask for trajectories for the free slots and ahead, unless a request is under way or was refused just now.

        ``num_free_slots`` is negative for those that are leased ahead already."""
        now_s = self._ctx.clock.monotonic()
        num_needed = max(0, num_free_slots)
        wanted = num_free_slots + self._num_ahead(now_s)
        may_ask = (self._credit if num_needed else self._surplus).may_ask(now_s)
        if wanted > 0 and may_ask and self._asking is None and self._grant is None:
            lease = self._lease(wanted, num_needed, policy_version)
            self._asking = self._ctx.spawn("lease", lease, endless=False)

    def take(self) -> LeaseGrant | None:
        """Return the answer to the last request, once."""
        grant, self._grant = self._grant, None
        return grant

    async def join(self) -> None:
        """Wait for the request that is under way. The ledger's client limits the wait."""
        if self._asking is not None:
            await asyncio.wait({self._asking})

    def _num_ahead(self, now_s: float) -> int:
        if len(self._ends_s) < _NUM_ENDS:
            return 0
        return int(_NUM_ENDS * _AHEAD_S / max(now_s - self._ends_s[0], _AHEAD_S))

    async def _lease(self, wanted: int, num_needed: int, policy_version: int) -> None:
        grant = await self._ctx.ledger.lease(self._ctx.who, max_trajectories=wanted, policy_version=policy_version)
        now_s = self._ctx.clock.monotonic()
        if len(grant.leases) >= num_needed:
            self._credit.reset()
        else:
            self._credit.refused(now_s)
        if grant.refusal is None:
            self._surplus.reset()
        else:
            self._surplus.refused(now_s)
        self._grant, self._asking = grant, None
