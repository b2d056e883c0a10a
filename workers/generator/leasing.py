"""Leases for a generator, asked for while its engine decodes.

A request takes a round trip to the ledger. The decode loop does not wait for it: a slot that comes free
would else hold up the others each time. For slots that will be free by the time of an answer it asks
ahead, at the rate at which slots came free lately; so what is leased ahead waits a fraction of a second,
and is not kept from a generator that has a slot for it."""

from __future__ import annotations

import asyncio

from pipeline.ledger.pacing import LeasePacing
from pipeline.ledger.types import LeaseGrant
from pipeline.runtime.actor import ActorContext


class Leasing:
    """At most one request for leases, beside the decode loop, which takes its answer."""

    def __init__(self, ctx: ActorContext) -> None:
        self._ctx = ctx
        self._pacing = LeasePacing()
        self._asking: asyncio.Task[None] | None = None
        self._grant: LeaseGrant | None = None

    @property
    def has_answer(self) -> bool:
        """Whether ``take`` has something; any thread may ask."""
        return self._grant is not None

    def slot_came_free(self) -> None:
        self._pacing.slot_came_free(self._ctx.clock.monotonic())

    def credit_came(self) -> None:
        """Ask again at once: a published version frees credit."""
        self._pacing.credit_came()

    def ask(self, num_free_slots: int, policy_version: int) -> None:
        """Ask for trajectories for the free slots and ahead, unless a request is under way or was refused just now.

        ``num_free_slots`` is negative for those that are leased ahead already."""
        wanted = self._pacing.wanted(num_free_slots, self._ctx.clock.monotonic())
        if wanted and self._asking is None and self._grant is None:
            lease = self._lease(wanted, max(0, num_free_slots), policy_version)
            self._asking = self._ctx.spawn("lease", lease, endless=False)

    def take(self) -> LeaseGrant | None:
        """Return the answer to the last request, once."""
        grant, self._grant = self._grant, None
        return grant

    async def join(self) -> None:
        """Wait for the request that is under way. The ledger's client limits the wait."""
        if self._asking is not None:
            await asyncio.wait({self._asking})

    async def _lease(self, wanted: int, num_needed: int, policy_version: int) -> None:
        grant = await self._ctx.ledger.lease(self._ctx.who, max_trajectories=wanted, policy_version=policy_version)
        self._pacing.answered(
            len(grant.leases),
            num_needed=num_needed,
            is_refused=grant.refusal is not None,
            now_s=self._ctx.clock.monotonic(),
        )
        self._grant, self._asking = grant, None
