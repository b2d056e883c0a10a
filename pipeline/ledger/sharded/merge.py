"""One view of the run out of its shards' views. Pure functions; shards come in their order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from pipeline.ledger.sharded.split import admission_order
from pipeline.ledger.types import (
    Audit,
    Balance,
    Claim,
    ClaimRefused,
    ClaimWait,
    EvaluationState,
    QueueStat,
    Refusal,
    Totals,
)

_SOONEST: Final = (
    *(Refusal.BEHIND, Refusal.MEMORY, Refusal.NO_CREDIT),
    *(Refusal.PAUSED, Refusal.EXHAUSTED, Refusal.CLOSED),
)
"""The refusal that may pass soonest is that of the run: only all shards together are exhausted."""
_WORST: Final = (ClaimWait.STARVED, ClaimWait.NOT_ENOUGH, ClaimWait.LATE_WORK)
"""An update needs every shard's share. So one starved shard starves the run."""


@dataclass(frozen=True, slots=True)
class ShardedAudit(Audit):
    """The conservation law of all shards. It holds only if it holds in each: one shard's surplus
    must not hide another's loss."""

    shards: tuple[Audit, ...] = ()

    @property
    def balances(self) -> bool:
        """Whether all differences of every shard are zero."""
        return all(shard.balances for shard in self.shards)


def merge_audits(shards: Sequence[Audit]) -> ShardedAudit:
    """Return the audit over all shards."""
    stored: Counter[str] = Counter()
    for shard in shards:
        stored.update(shard.tokens_stored)
    return ShardedAudit(
        groups=_balance(shard.groups for shard in shards),
        trajectories=_balance(shard.trajectories for shard in shards),
        tokens=_balance(shard.tokens for shard in shards),
        finished=_balance(shard.finished for shard in shards),
        tokens_stored=dict(stored),
        num_unflushed=max(shard.num_unflushed for shard in shards),
        shards=tuple(shards),
    )


def merge_totals(shards: Sequence[Totals]) -> Totals:
    """Return the counters of all shards, and the version of the first, which is never behind."""
    return Totals(
        policy_version=shards[0].policy_version,
        credit_used=sum(shard.credit_used for shard in shards),
        credit_limit=sum(shard.credit_limit for shard in shards),
        num_ready_units=sum(shard.num_ready_units for shard in shards),
        num_running=sum(shard.num_running for shard in shards),
        num_groups_admitted=sum(shard.num_groups_admitted for shard in shards),
        num_groups_dropped=_sum(shard.num_groups_dropped for shard in shards),
        num_tokens_generated=sum(shard.num_tokens_generated for shard in shards),
        num_tokens_trained=sum(shard.num_tokens_trained for shard in shards),
        is_closed=any(shard.is_closed for shard in shards),
        is_exhausted=all(shard.is_exhausted for shard in shards),
        num_unflushed=max(shard.num_unflushed for shard in shards),
        # a shard's groups are every n-th of the run's
        next_group=max(
            (shard.num_groups_admitted - 1) * len(shards) + index + 1 if shard.num_groups_admitted else 0
            for index, shard in enumerate(shards)
        ),
        num_trajectories_admitted=sum(shard.num_trajectories_admitted for shard in shards),
        credit_trained=sum(shard.credit_trained for shard in shards),
        num_finished_admitted=sum(shard.num_finished_admitted for shard in shards),
        num_finished_trained=sum(shard.num_finished_trained for shard in shards),
        # the home's is the first; a shard that was away keeps its own for longer
        paused=next((shard.paused for shard in shards if shard.paused is not None), None),
    )


def merge_queues(shards: Sequence[Sequence[QueueStat]]) -> list[QueueStat]:
    """Return every queue's depth and limit over all shards, and its oldest age."""
    merged: list[QueueStat] = []
    for stats in zip(*shards, strict=True):
        limits = [stat.limit for stat in stats]
        ages = [stat.oldest_age_s for stat in stats if stat.oldest_age_s is not None]
        whole = None if None in limits else sum(limit or 0 for limit in limits)
        depth = sum(stat.depth for stat in stats)
        merged.append(replace(stats[0], depth=depth, limit=whole, oldest_age_s=max(ages, default=None)))
    return merged


def merge_refusals(refusals: Iterable[Refusal]) -> Refusal:
    """Return why no shard gave more."""
    return min(refusals, key=_SOONEST.index)


def merge_claims(claim_id: str, parts: Sequence[Claim]) -> Claim:
    """Return the claim of all shards' shares, in order of admission."""
    units = sorted((unit for part in parts for unit in part.units), key=admission_order)
    return Claim(claim_id, parts[0].policy_version, tuple(units))


def merge_waits(claimed: Iterable[Claim], refused: Sequence[ClaimRefused]) -> ClaimRefused:
    """Return what an update waits for, whose other shares are claimed. While units lack, those of a
    shard beyond its share do not count: they are no help to another."""
    there = sum(len(claim.units) for claim in claimed)
    oldest = [refusal.oldest_running for refusal in refused if refusal.oldest_running is not None]
    wait = min((refusal.wait for refusal in refused), key=_WORST.index)
    is_full = wait is ClaimWait.LATE_WORK
    return ClaimRefused(
        wait=wait,
        num_ready=there + sum(one.num_ready if is_full else min(one.num_ready, one.num_needed) for one in refused),
        num_needed=there + sum(refusal.num_needed for refusal in refused),
        oldest_running=min(oldest, key=admission_order, default=None),
    )


def merge_evaluations(shards: Sequence[EvaluationState | None]) -> EvaluationState | None:
    """Return an evaluation's progress; None unless the first shard, which learns of it first, has
    it."""
    if shards[0] is None:
        return None
    known = [shard for shard in shards if shard is not None]
    samples = sorted((one for shard in known for one in shard.samples), key=lambda one: (one.prompt, one.sample))
    return EvaluationState(shards[0].request, tuple(samples), sum(shard.num_failed for shard in known))


def _balance(balances: Iterable[Balance]) -> Balance:
    every = tuple(balances)
    return Balance(
        admitted=sum(one.admitted for one in every),
        trained=sum(one.trained for one in every),
        dropped=_sum(one.dropped for one in every),
        in_flight=_sum(one.in_flight for one in every),
    )


def _sum(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for one in counts:
        total.update(one)
    return dict(total)
