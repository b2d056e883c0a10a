"""The contract over several ledgers: one run, its groups spread over shards.

Shard 0 is the run's *home*: registry and news are beside it, and it alone counts what is spent. A
call that concerns all shards goes to the home first, since the registry fences there. So an older
incarnation changes no other shard once a newer one is registered.

Crashes between two shards leave nothing half done:

* *claim*: shares that were claimed are kept for the next call; ``recover`` returns them.
* *settle*: every share is settled by its own key. ``recover`` settles what is left, out of the
  checkpoint, which names the whole claim.
* *advance*: shards behind admit less, until ``resume_from`` gives all of them the version.
* *an evaluation* that only some shards have is passed over by the next learner."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import TypeVar

from pipeline.ledger.contract import Ledger
from pipeline.ledger.sharded.calls import Unhindered, together
from pipeline.ledger.sharded.merge import (
    ShardedAudit,
    merge_audits,
    merge_evaluations,
    merge_queues,
    merge_refusals,
    merge_totals,
)
from pipeline.ledger.sharded.shares import FinishedShares, UpdateShares
from pipeline.ledger.sharded.split import (
    admission_order,
    group_of,
    own_shard,
    shard_spec,
    split_claim,
    split_claims,
)
from pipeline.ledger.types import (
    ChunkWrite,
    Claim,
    ClaimedUnit,
    ClaimRefused,
    DeadLetter,
    DropReason,
    EvaluationRequest,
    EvaluationState,
    FinishedClaim,
    Lease,
    LeaseGrant,
    LedgerSpec,
    QueueStat,
    Refusal,
    Restart,
    ScoredChunk,
    ShownResponse,
    Totals,
    UnitLetter,
    WriteStatus,
)
from pipeline.ledger.validation import check_value_batch, claim_gone, parse_chunk
from protocol.codec import Encoded
from protocol.errors import LedgerError, LedgerUnavailable
from protocol.ids import ChunkId, Incarnation, TrajectoryId
from protocol.trajectory import Field, Score, TrajectoryChunk

T = TypeVar("T")

RaiseEpoch = Callable[[str, int], Awaitable[None]]
"""Makes a worker's epoch known to a shard."""


class ShardedLedger:
    """``pipeline.ledger.contract.Ledger`` over ``shards``; the first is the home.

    ``raise_epoch``: one for each shard but the home, called before an incarnation's first call
    there. None when the shards read the registry's epochs themselves. ``is_away``: whether a shard
    gives no answer now; leases, renewals and overdue chunks of the others go on."""

    def __init__(
        self,
        shards: Sequence[Ledger],
        *,
        raise_epoch: Sequence[RaiseEpoch] | None = None,
        is_away: Callable[[int], bool] = lambda _: False,
    ) -> None:
        self._shards = tuple(shards)
        self._raise_epoch = raise_epoch
        self._entered: set[tuple[int, str]] = set()
        self._used: dict[str, set[int]] = {}
        """Shards where an incarnation may hold trajectories."""
        self._undelivered: dict[str, list[Lease]] = {}
        """Leased by a call that then failed at another shard; the next call returns them."""
        self._next_overdue = 0
        self._unhindered = Unhindered(is_away)
        self._shares = UpdateShares(self.num_shards, self._enter)
        self._finished = FinishedShares(self.num_shards, self._enter)

    @property
    def num_shards(self) -> int:
        """Number of ledgers."""
        return len(self._shards)

    async def open(self, spec: LedgerSpec) -> None:
        """Create or join every shard. Raises LedgerMismatch, and ConfigError when an update's units
        do not divide."""
        parts = [shard_spec(spec, index, self.num_shards) for index in range(self.num_shards)]
        await self._shards[0].open(parts[0])
        await together(shard.open(part) for shard, part in zip(self._shards[1:], parts[1:], strict=True))

    # -- generation ------------------------------------------------------------------------------

    async def lease(self, who: Incarnation, *, max_trajectories: int, policy_version: int | None = None) -> LeaseGrant:
        """Lease from the worker's own shard, then from the others, while they have credit.

        Evaluation comes first in each shard."""
        used = self._used.setdefault(str(who), set())
        got = self._undelivered.setdefault(str(who), [])
        refusals: list[Refusal] = []
        own = own_shard(who.worker, self.num_shards)
        for place in range(self.num_shards):
            index, wanted = (own + place) % self.num_shards, max_trajectories - len(got)
            if place and wanted <= 0:
                break
            used.add(index)
            lease = partial(self._lease_at, index, who, max(0, wanted), policy_version)
            try:
                grant = await self._unhindered.call(f"lease {who}", index, lease)
            except LedgerUnavailable:
                if not got:
                    raise
                return LeaseGrant(self._deliver(who, max_trajectories))
            if grant is None:
                continue
            got += grant.leases
            if grant.refusal is not None:
                refusals.append(grant.refusal)
        leases = self._deliver(who, max_trajectories)
        is_short = len(leases) < max_trajectories and refusals
        return LeaseGrant(leases, merge_refusals(refusals) if is_short else None)

    async def _lease_at(self, index: int, who: Incarnation, most: int, policy_version: int | None) -> LeaseGrant:
        return await (await self._enter(index, who)).lease(who, max_trajectories=most, policy_version=policy_version)

    async def renew(self, who: Incarnation) -> None:
        """Extend the lease on all that ``who`` holds, in every shard that is not away."""

        async def renew_at(index: int) -> None:
            await (await self._enter(index, who)).renew(who)

        used = sorted(self._used.get(str(who)) or range(self.num_shards))
        await together(self._unhindered.call(f"renew {who}", index, partial(renew_at, index)) for index in used)

    async def give_back(self, who: Incarnation, trajectories: tuple[TrajectoryId, ...] | None = None) -> int:
        """Open held trajectories at once; return their number."""
        if trajectories is None:
            self._undelivered.pop(str(who), None)
            return sum(await self._where_used(who, lambda shard: shard.give_back(who)))
        by_shard: dict[int, list[TrajectoryId]] = {}
        for trajectory in trajectories:
            by_shard.setdefault(self._index_of(trajectory.group), []).append(trajectory)

        async def back(index: int, some: list[TrajectoryId]) -> int:
            return await (await self._enter(index, who)).give_back(who, tuple(some))

        return sum(await together(back(index, some) for index, some in sorted((by_shard or {0: []}).items())))

    async def write_chunk(self, who: Incarnation, chunk: TrajectoryChunk, encoded: Encoded | None = None) -> ChunkWrite:
        """Store a chunk once in its group's shard."""
        return await (await self._shard_of(chunk.trajectory.group, who)).write_chunk(who, chunk, encoded)

    # -- scoring ---------------------------------------------------------------------------------

    async def write_score(self, who: Incarnation, chunk: ChunkId, score: Score) -> WriteStatus:
        """Fill a field of a chunk once."""
        return await (await self._shard_of(chunk.trajectory.group, who)).write_score(who, chunk, score)

    async def overdue(self, who: Incarnation, field: Field, *, max_chunks: int) -> list[ScoredChunk]:
        """Return overdue chunks of one shard after another, each time from another one on."""
        first, self._next_overdue = self._next_overdue, (self._next_overdue + 1) % self.num_shards
        found: list[ScoredChunk] = []

        async def at(index: int, most: int) -> list[ScoredChunk]:
            return await (await self._enter(index, who)).overdue(who, field, max_chunks=most)

        for place in range(self.num_shards):
            index, most = (first + place) % self.num_shards, max_chunks - len(found)
            try:
                found += await self._unhindered.call(f"overdue {field} {who}", index, partial(at, index, most)) or []
            except LedgerUnavailable:
                if not found:
                    raise
            if len(found) >= max_chunks:
                break
        # A late answer may be to an earlier request for more; what is left out is due again.
        return found[:max_chunks]

    async def finished_group(self, who: Incarnation, group: int, *, num_members: int) -> list[TrajectoryChunk]:
        """Give a group that has ended to one scorer: its final chunks; else nothing."""
        return await (await self._shard_of(group, who)).finished_group(who, group, num_members=num_members)

    async def extend_scoring(self, who: Incarnation, field: Field, chunks: tuple[ChunkId, ...]) -> None:
        """Extend the deadlines of chunks that ``who`` scores, and of their groups."""

        async def extend(index: int, some: list[ChunkId]) -> None:
            await (await self._enter(index, who)).extend_scoring(who, field, tuple(some))

        await together(extend(index, some) for index, some in self._by_shard(chunks).items())

    async def expire_scoring(self, who: Incarnation, field: Field, chunks: tuple[ChunkId, ...]) -> int:
        """Make chunks of a lost scorer due at once; return how many were not."""

        async def expire(index: int, some: list[ChunkId]) -> int:
            return await (await self._enter(index, who)).expire_scoring(who, field, tuple(some))

        return sum(await together(expire(index, some) for index, some in self._by_shard(chunks).items()))

    async def spend(self, who: Incarnation, name: str, *, limit: int) -> bool:
        """Take one of ``limit`` for the whole run; the home counts."""
        return await self._shards[0].spend(who, name, limit=limit)

    async def fail_score(self, who: Incarnation, chunk: ChunkId, field: Field, error: str) -> bool:
        """Count a failure; after ``max_attempts`` the chunk is a dead letter."""
        return await (await self._shard_of(chunk.trajectory.group, who)).fail_score(who, chunk, field, error)

    async def dead_letters(self, *, limit: int = 100) -> list[DeadLetter]:
        """Return the newest dead letters first."""
        found = await together(shard.dead_letters(limit=limit) for shard in self._shards)
        letters = sorted((one for some in found for one in some), key=lambda one: one.at_s, reverse=True)
        return letters[: max(0, limit)]

    # -- learning --------------------------------------------------------------------------------

    async def claim(self, who: Incarnation, *, policy_version: int) -> Claim | ClaimRefused:
        """Claim every shard's share of an update, or return what the missing shares wait for.

        Shares that could be claimed are kept for the next call at this version. Before a call at
        another version they are returned, since they may be too old for it."""
        return await self._shares.claim(who, policy_version)

    async def fetch(self, claim: Claim) -> list[ClaimedUnit]:
        """Read a claim's units. Raises LedgerError when it was settled, returned or cancelled."""
        parts = self._parts_of(claim)
        if not parts:
            raise claim_gone(claim)
        found = await together(self._shards[index].fetch(part) for index, part in parts.items())
        return sorted((unit for units in found for unit in units), key=lambda unit: admission_order(unit.name))

    async def drop(
        self, who: Incarnation, claim: Claim, unit: str, reason: DropReason, letter: UnitLetter | None = None
    ) -> None:
        """Drop one unit out of a claim; its credit returns. A repeat changes nothing."""
        index = self._index_of(group_of(unit))
        part = self._parts_of(claim).get(index)
        if part is not None:
            await (await self._enter(index, who)).drop(who, part, unit, reason, letter)

    async def return_claim(self, who: Incarnation, claim_id: str) -> int:
        """Return a claim's units to ready, and their number."""

        async def back(index: int, part: str) -> int:
            return await (await self._enter(index, who)).return_claim(who, part)

        return sum([await back(*part) for part in split_claim(claim_id, self.num_shards)])

    async def advance(self, who: Incarnation, policy_version: int) -> None:
        """Make ``policy_version`` the one that admission counts from, in every shard."""
        await self._home_first(who, lambda _, shard: shard.advance(who, policy_version))

    async def settle(self, who: Incarnation, claims: tuple[str, ...], *, num_updates: int | None = None) -> int:
        """Settle every shard's part of these claims; return how many were not yet settled."""
        parts = split_claims(claims, self.num_shards)
        settled = await self._home_first(
            who, lambda index, shard: shard.settle(who, parts[index], num_updates=num_updates)
        )
        return max(settled)

    async def make_durable(self, who: Incarnation) -> bool:
        """Wait until every shard's writes are on its disk; False when one cannot confirm it."""
        return all(await self._home_first(who, lambda _, shard: shard.make_durable(who)))

    async def recover(self, who: Incarnation, applied: tuple[str, ...], *, kept: tuple[str, ...] = ()) -> int:
        """Settle a checkpoint's claims, keep a snapshot's; return the number of other units."""
        self._shares.clear()
        parts, held = split_claims(applied, self.num_shards), split_claims(kept, self.num_shards)
        return sum(await self._home_first(who, lambda index, shard: shard.recover(who, parts[index], kept=held[index])))

    async def missing(self, claims: tuple[str, ...]) -> tuple[str, ...]:
        """Return those of these claims of which a shard's part is not there."""
        parts = split_claims(claims, self.num_shards)
        found = await together(shard.missing(parts[index]) for index, shard in enumerate(self._shards))
        lost = {(index, part) for index, missed in enumerate(found) for part in missed}
        return tuple(
            claim for claim in claims if not (own := split_claim(claim, self.num_shards)) or lost.intersection(own)
        )

    async def resume_from(self, who: Incarnation, restart: Restart) -> int:
        """Count from these weights on; return the credit of the trained units given up."""
        return sum(await self._home_first(who, lambda _, shard: shard.resume_from(who, restart)))

    async def restarts(self) -> tuple[Restart, ...]:
        """Return all restarts, by version. Raises LedgerError when only some shards have any."""
        known = await together(shard.restarts() for shard in self._shards)
        if any(known) and not all(known):
            raise LedgerError(
                f"ledger server {known.index(())} of {self.num_shards} has no record of this run, and others have: it was "
                "emptied or is another. Give the right servers by ledger.url and ledger.shards, or start a new run from the "
                "newest checkpoint's model"
            )
        return known[0]

    async def claim_finished(self, who: Incarnation, *, num_trajectories: int) -> FinishedClaim | int:
        """Claim finished trajectories of all shards for the value model, or return how many there
        are. Each shard gives an even part, as far as it has so many."""
        check_value_batch(num_trajectories)
        return await self._finished.claim(who, num_trajectories)

    async def settle_finished(self, who: Incarnation, claims: tuple[str, ...]) -> int:
        """Forget trained value batches; return how many were not yet settled."""
        parts = split_claims(claims, self.num_shards)
        return max(await self._home_first(who, lambda index, shard: shard.settle_finished(who, parts[index])))

    async def recover_finished(self, who: Incarnation, applied: tuple[str, ...], *, kept: tuple[str, ...] = ()) -> int:
        """Settle a checkpoint's value batches, keep a snapshot's; return the number of other
        trajectories."""
        self._finished.clear()
        parts, held = split_claims(applied, self.num_shards), split_claims(kept, self.num_shards)
        return sum(
            await self._home_first(
                who, lambda index, shard: shard.recover_finished(who, parts[index], kept=held[index])
            )
        )

    async def close_admission(self, who: Incarnation) -> None:
        """Give no new credit from now on, in any shard."""
        await self._home_first(who, lambda _, shard: shard.close_admission(who))

    async def cancel_in_flight(self, who: Incarnation, reason: DropReason = DropReason.CANCELLED) -> int:
        """Drop all work that is not trained; return the number of groups."""
        self._shares.clear()
        return sum(await self._home_first(who, lambda _, shard: shard.cancel_in_flight(who, reason)))

    async def take_shown(self, who: Incarnation) -> tuple[ShownResponse, ...]:
        """Return responses that are kept for people to read, and forget them."""
        shards = [await self._enter(index, who) for index in range(self.num_shards)]
        found = await together(shard.take_shown(who) for shard in shards)
        return tuple(one for some in found for one in some)

    # -- evaluation ------------------------------------------------------------------------------

    async def request_evaluation(self, who: Incarnation, request: EvaluationRequest) -> None:
        """Open an evaluation's trajectories; each shard opens every so many-th prompt's."""
        await self._home_first(who, lambda _, shard: shard.request_evaluation(who, request))

    async def evaluation(self, number: int) -> EvaluationState | None:
        """Return an evaluation's progress; None when it was never requested."""
        return merge_evaluations(await together(shard.evaluation(number) for shard in self._shards))

    # -- views -----------------------------------------------------------------------------------

    async def totals(self) -> Totals:
        """Return the counters of all shards."""
        return merge_totals(await together(shard.totals() for shard in self._shards))

    async def audit(self) -> ShardedAudit:
        """Count both sides of the conservation law in every shard, each at one moment."""
        return merge_audits(await together(shard.audit() for shard in self._shards))

    async def queues(self) -> list[QueueStat]:
        """Return every ledger queue's depth, limit, oldest age and consumer, over all shards."""
        return merge_queues(await together(shard.queues() for shard in self._shards))

    async def peek(self, key: str) -> list[bytes]:
        """Return the stored bytes of a chunk, then of its scores; empty when unknown."""
        chunk = parse_chunk(key)
        return [] if chunk is None else await self._shards[self._index_of(chunk.trajectory.group)].peek(key)

    async def aclose(self) -> None:
        """Release the connections to all shards. Repeated calls do nothing."""
        await self._unhindered.aclose()
        await together(shard.aclose() for shard in self._shards)

    # -- inside ----------------------------------------------------------------------------------

    def _by_shard(self, chunks: Iterable[ChunkId]) -> dict[int, list[ChunkId]]:
        found: dict[int, list[ChunkId]] = {}
        for chunk in chunks:
            found.setdefault(self._index_of(chunk.trajectory.group), []).append(chunk)
        return found

    def _index_of(self, group: int) -> int:
        return group % self.num_shards

    async def _shard_of(self, group: int, who: Incarnation) -> Ledger:
        return await self._enter(self._index_of(group), who)

    async def _enter(self, index: int, who: Incarnation) -> Ledger:
        """Return a shard that knows this incarnation's epoch, and so fences earlier ones."""
        if index and self._raise_epoch is not None and (index, str(who)) not in self._entered:
            await self._raise_epoch[index - 1](who.worker, who.epoch)
            self._entered.add((index, str(who)))
        return self._shards[index]

    async def _home_first(self, who: Incarnation, call: Callable[[int, Ledger], Awaitable[T]]) -> list[T]:
        """Call every shard, the home before all others; return the results in their order."""
        first = await call(0, self._shards[0])

        async def one(index: int) -> T:
            return await call(index, await self._enter(index, who))

        return [first, *await together(one(index) for index in range(1, self.num_shards))]

    async def _where_used(self, who: Incarnation, call: Callable[[Ledger], Awaitable[T]]) -> list[T]:
        """Call every shard where ``who`` may hold something."""

        async def one(index: int) -> T:
            return await call(await self._enter(index, who))

        return await together(one(index) for index in sorted(self._used.get(str(who)) or range(self.num_shards)))

    def _deliver(self, who: Incarnation, most: int) -> tuple[Lease, ...]:
        got = self._undelivered.pop(str(who))
        if got[most:]:
            self._undelivered[str(who)] = got[most:]
        return tuple(got[:most])

    def _parts_of(self, claim: Claim) -> dict[int, Claim]:
        """Return each shard's part of a claim."""
        units: dict[int, list[str]] = {index: [] for index in range(self.num_shards)}
        for unit in claim.units:
            units[self._index_of(group_of(unit))].append(unit)
        parts = split_claim(claim.claim_id, self.num_shards)
        return {index: Claim(part, claim.policy_version, tuple(units[index])) for index, part in parts}
