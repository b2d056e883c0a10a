"""Claims that take a share of every shard. Shares wait here for the others'.

A share is kept at once when its shard gives it, so another shard's failure loses none. ``recover``
returns the shares that a process kept until its death, as every claim."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, TypeAlias

from pipeline.ledger.contract import Ledger
from pipeline.ledger.sharded.calls import together
from pipeline.ledger.sharded.merge import merge_claims, merge_waits
from pipeline.ledger.sharded.split import join_claims
from pipeline.ledger.types import Claim, ClaimRefused, FinishedClaim
from protocol.ids import Incarnation

Enter: TypeAlias = Callable[[int, Incarnation], Awaitable[Ledger]]
"""Returns a shard that knows the caller's epoch."""
_MORE_THAN_ANY: Final = 1 << 40
"""Finished trajectories: a claim of so many is answered with their number."""


class UpdateShares:
    """The shares of the update that is being claimed."""

    def __init__(self, num_shards: int, enter: Enter) -> None:
        self._num_shards = num_shards
        self._enter = enter
        self._one_at_a_time = asyncio.Lock()
        self._kept: dict[int, Claim] = {}
        self._kept_for: tuple[str, int] | None = None

    def clear(self) -> None:
        """Forget the kept shares, which the shards have back."""
        self._kept.clear()

    async def claim(self, who: Incarnation, policy_version: int) -> Claim | ClaimRefused:
        """Claim the missing shares; return the whole claim, or what the missing ones wait for."""
        async with self._one_at_a_time:
            if self._kept_for != (str(who), policy_version):
                await self._return_kept(who)
            self._kept_for = (str(who), policy_version)
            missing = [index for index in range(self._num_shards) if index not in self._kept]
            outcomes = await together(self._claim_share(index, who, policy_version) for index in missing)
            refused = [outcome for outcome in outcomes if outcome is not None]
            if refused:
                return merge_waits(self._kept.values(), refused)
            claim_id = join_claims((index, part.claim_id) for index, part in self._kept.items())
            claim = merge_claims(claim_id, [*self._kept.values()])
            self._kept.clear()
            return claim

    async def _claim_share(self, index: int, who: Incarnation, policy_version: int) -> ClaimRefused | None:
        outcome = await (await self._enter(index, who)).claim(who, policy_version=policy_version)
        if isinstance(outcome, ClaimRefused):
            return outcome
        self._kept[index] = outcome
        return None

    async def _return_kept(self, who: Incarnation) -> None:
        """Return the kept shares to ready; ``recover`` has returned an earlier incarnation's."""
        if self._kept_for is not None and self._kept_for[0] != str(who):
            self._kept.clear()
        for index, part in [*self._kept.items()]:
            await (await self._enter(index, who)).return_claim(who, part.claim_id)
            del self._kept[index]


class FinishedShares:
    """The parts of the value batch that is being claimed."""

    def __init__(self, num_shards: int, enter: Enter) -> None:
        self._num_shards = num_shards
        self._enter = enter
        self._one_at_a_time = asyncio.Lock()
        self._kept: list[tuple[int, FinishedClaim]] = []

    def clear(self) -> None:
        """Forget the kept parts, which the shards have back."""
        self._kept.clear()

    async def claim(self, who: Incarnation, wanted: int) -> FinishedClaim | int:
        """Claim even parts, as far as each shard has so many; or return how many there are."""
        async with self._one_at_a_time:
            have = sum(len(part.trajectories) for _, part in self._kept)
            # The first shard alone, for its fence.
            there = [await self._count(0, who)]
            there += await together(self._count(index, who) for index in range(1, self._num_shards))
            if have + sum(there) < wanted:
                return have + sum(there)
            for index, number in enumerate(even_parts(wanted - have, there)):
                if number:
                    part = await (await self._enter(index, who)).claim_finished(who, num_trajectories=number)
                    # Fewer when some were discarded meanwhile; the next call claims the rest.
                    if isinstance(part, int):
                        return wanted - number + part
                    self._kept.append((index, part))
            kept, self._kept = self._kept, []
            claim_id = join_claims((index, part.claim_id) for index, part in kept)
            return FinishedClaim(claim_id, tuple(one for _, part in kept for one in part.trajectories))

    async def _count(self, index: int, who: Incarnation) -> int:
        """Return how many finished trajectories wait in a shard."""
        number = await (await self._enter(index, who)).claim_finished(who, num_trajectories=_MORE_THAN_ANY)
        assert isinstance(number, int)
        return number


def even_parts(wanted: int, there: Sequence[int]) -> list[int]:
    """Return how many each shard gives: even parts, and more where others have too few."""
    parts = [0] * len(there)
    while (left := wanted - sum(parts)) > 0:
        open_ = [index for index, number in enumerate(there) if parts[index] < number]
        part, rest = divmod(left, len(open_))
        for place, index in enumerate(open_):
            parts[index] += min(there[index] - parts[index], part + (place < rest))
    return parts
