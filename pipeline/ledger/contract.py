"""The ledger's contract: what the durable ledger promises between sampling and learning.

One state machine, two implementations: ``pipeline.ledger.memory.ledger`` (in this process) and
``pipeline.ledger.redis.ledger`` (Lua scripts, one per transition). One contract suite runs on both.

    admit ──> open ──> leased ──> finished ──> ready ──> claimed ──> trained
                ^         │           │           │          │
                └─────────┴───────────┴───────────┴──────────┴──> dropped(reason)

*Consumes* chunks, scores and claims. *Produces* leases for generators, work for scorers, units for
the learner, and finished trajectories for the value worker. *Waits for* nothing: every call returns
at once, with a refusal that names its reason when nothing can be given.

Units. The algorithm's unit is what the learner claims: a ``group`` (DAPO, GRPO), a ``trajectory``
(VAPO, PPO) or a ``chunk`` (T-PPO). Credit is counted in chunks when the unit is the chunk, else in
trajectories, granted a whole group at a time. Admission holds ``trained + claimed + ready + running
+ granted <= (eta + v + 1) * B + surplus`` with ``v`` the updates in the published policy version
(``pipeline.ledger.version_history``), ``B`` the units per update,
``surplus = floor((oversampling - 1) * B)``; a dropped unit leaves the sum, which is how its credit
returns.

Conservation. For groups, trajectories and response tokens, at every moment:
``admitted = trained + dropped(by reason) + in flight``. ``audit`` counts the right-hand side by
walking what is stored, not by a counter that could agree with itself.

Critics. With ``value_training`` finished trajectories are kept for the value worker besides, each
until it has trained on it: claimed and settled like units, by claims of its own, under the same
law: admitted = trained + dropped + in flight.

Exactly-once. Delivery is at least once and every write is keyed: a chunk that is there already, a
field that is written already, a claim that is settled already change nothing. What gives something
out or takes it back is numbered instead. So a call whose reply was lost may be repeated, and a copy
of it that arrives at any later time changes nothing (``renew`` aside, which by its nature moves the
end of a lease again). A call by an incarnation that is no longer the newest of its worker raises
``Fenced`` and has no effect; so does a chunk by a generator that lost the trajectory's lease (it
gets ``WriteStatus.FENCED``, since others of its trajectories may be fine).
"""

from __future__ import annotations

from typing import Protocol

from pipeline.ledger.types import (
    SPOILING,
    Audit,
    Balance,
    ChunkWrite,
    Claim,
    ClaimedUnit,
    ClaimRefused,
    ClaimWait,
    DeadLetter,
    DropReason,
    EvaluationRequest,
    EvaluationSample,
    EvaluationState,
    FinishedClaim,
    FinishedTrajectory,
    LatePolicy,
    Lease,
    LeaseGrant,
    LedgerSpec,
    QueueStat,
    Refusal,
    Restart,
    ScoredChunk,
    Totals,
    Unit,
    WriteStatus,
)
from protocol.codec import Encoded
from protocol.ids import ChunkId, Incarnation, TrajectoryId
from protocol.trajectory import Field, Score, TrajectoryChunk

__all__ = [
    "SPOILING",
    "Audit",
    "Balance",
    "ChunkWrite",
    "Claim",
    "ClaimRefused",
    "ClaimWait",
    "ClaimedUnit",
    "DeadLetter",
    "DropReason",
    "EvaluationRequest",
    "EvaluationSample",
    "EvaluationState",
    "FinishedClaim",
    "FinishedTrajectory",
    "LatePolicy",
    "Lease",
    "LeaseGrant",
    "Ledger",
    "LedgerSpec",
    "QueueStat",
    "Refusal",
    "Restart",
    "ScoredChunk",
    "Totals",
    "Unit",
    "WriteStatus",
]


class Ledger(Protocol):
    """The durable ledger. Every method is one atomic transition.

    All methods raise LedgerUnavailable when no server answers, and those that take an incarnation
    raise Fenced when it is not the newest of its worker.
    """

    async def open(self, spec: LedgerSpec) -> None:
        """Create the run's ledger, or join it. Raises LedgerMismatch, naming the differing
        settings, when specs differ.
        """
        ...

    # -- generation
    # ----------------------------------------------------------------------------------------------------

    async def lease(self, who: Incarnation, *, max_trajectories: int, policy_version: int | None = None) -> LeaseGrant:
        """Give ``who``, which samples with ``policy_version`` (None: with the published one),
        trajectories to work on.

        In this order, up to ``max_trajectories``: evaluation; training trajectories that nobody
        holds (their generator died or drained, or they were parked at a window), oldest first; then
        new groups, each admitted whole while there is credit (members over the limit stay open for
        the next caller).
        """
        ...

    async def renew(self, who: Incarnation) -> None:
        """Say that ``who`` still works on all that it holds."""
        ...

    async def give_back(self, who: Incarnation, trajectories: tuple[TrajectoryId, ...] | None = None) -> int:
        """Open these trajectories (all that ``who`` holds when None) for others at once; return how
        many.
        """
        ...

    async def write_chunk(self, who: Incarnation, chunk: TrajectoryChunk, encoded: Encoded | None = None) -> ChunkWrite:
        """Store a chunk once, under its own key, and index it for its scorers. ``encoded`` is the
        chunk's, when there is one.

        Raises LedgerFull when the server refuses writes; nothing has then changed and the caller
        may repeat.
        """
        ...

    # -- scoring
    # -------------------------------------------------------------------------------------------------------

    async def write_score(self, who: Incarnation, chunk: ChunkId, score: Score) -> WriteStatus:
        """Fill a field of a chunk once. The write that completes a unit makes it ready, or drops it
        for want of signal.
        """
        ...

    async def overdue(self, who: Incarnation, field: Field, *, max_chunks: int) -> list[TrajectoryChunk]:
        """Hand out chunks whose ``field`` is past its deadline, oldest first, and move their
        deadlines on.
        """
        ...

    async def fail_score(self, who: Incarnation, chunk: ChunkId, field: Field, error: str) -> bool:
        """Report that scoring failed, with a traceback. The chunk is due again at once; after
        ``max_attempts`` its unit (for a group: the whole group) is dropped as a dead letter.
        Returns whether it was."""
        ...

    async def dead_letters(self, *, limit: int = 100) -> list[DeadLetter]:
        """Return the newest dead letters first."""
        ...

    # -- learning
    # ------------------------------------------------------------------------------------------------------

    async def claim(self, who: Incarnation, *, policy_version: int) -> Claim | ClaimRefused:
        """Claim one update's units in order of admission, after dropping ready units that are too
        stale for ``policy_version``."""
        ...

    async def fetch(self, claim: Claim) -> list[ClaimedUnit]:
        """Read everything that a claim holds, in the claim's order."""
        ...

    async def drop(self, who: Incarnation, claim: Claim, unit: str, reason: DropReason) -> None:
        """Drop one unit out of a claim; its credit returns."""
        ...

    async def advance(self, who: Incarnation, policy_version: int) -> None:
        """Make ``policy_version`` the one that admission counts from. It only grows."""
        ...

    async def settle(self, who: Incarnation, claims: tuple[str, ...], *, num_updates: int | None = None) -> int:
        """Mark these claims trained and forget their data; return how many were not settled before.
        Idempotent.

        ``num_updates``, of the checkpoint that holds them, lets :meth:`resume_from` count what it
        gives up.
        """
        ...

    async def make_durable(self, who: Incarnation) -> bool:
        """Return once all that was written so far survives the death of the server and of its
        machine; at once, with False, when this server cannot say so (no append-only file, older
        than Redis 7.2, or not permitted). ``totals`` and ``audit`` count these in a row."""
        ...

    async def recover(self, who: Incarnation, applied: tuple[str, ...]) -> int:
        """Called once by a new learner incarnation: settle the claims whose effect its checkpoint
        holds, return every other claim's units to ready. Returns how many units came back."""
        ...

    async def resume_from(self, who: Incarnation, restart: Restart) -> int:
        """Called once by a new learner incarnation, after ``recover``: count credit and staleness
        from these weights on, and admit again if the run had ended.

        Units that were settled by updates which these weights do not hold are counted as dropped,
        ``ROLLED_BACK``, and no longer as trained; their credit returns. Returns how much credit
        that is: 0 unless a checkpoint was damaged, or an older one chosen. Raises LedgerError when
        nothing tells how many they are, with nothing changed.
        """
        ...

    async def restarts(self) -> tuple[Restart, ...]:
        """Return all restarts, by version: what maps versions to updates."""
        ...

    async def claim_finished(self, who: Incarnation, *, num_trajectories: int) -> FinishedClaim | int:
        """Claim exactly ``num_trajectories`` finished ones for the value model, in order of
        admission; or return how many there are when they are fewer. Each is claimed once, whatever
        becomes of its unit. A claim whose reply was lost is given again, less what was discarded
        since. Raises LedgerError without ``LedgerSpec.value_training``."""
        ...

    async def settle_finished(self, who: Incarnation, claims: tuple[str, ...]) -> int:
        """Forget trained value batches; return how many were not settled before. Idempotent."""
        ...

    async def recover_finished(self, who: Incarnation, applied: tuple[str, ...]) -> int:
        """Called once by a new value incarnation: settle what its checkpoint holds, return the
        rest. Returns how many trajectories came back."""
        ...

    async def close_admission(self, who: Incarnation) -> None:
        """Admit nothing new from now on: the run has all the updates that it wants."""
        ...

    async def cancel_in_flight(self, who: Incarnation, reason: DropReason = DropReason.CANCELLED) -> int:
        """Drop everything that is not trained; return how many groups. Used at the end of a
        finished run. What the value worker has claimed stays: it has trained on it, and settles it
        as it drains."""
        ...

    # -- evaluation
    # ----------------------------------------------------------------------------------------------------

    async def request_evaluation(self, who: Incarnation, request: EvaluationRequest) -> None:
        """Open an evaluation's trajectories. A repeat of the same number changes nothing."""
        ...

    async def evaluation(self, number: int) -> EvaluationState | None:
        """Return how far an evaluation is; None when it was never requested."""
        ...

    # -- looking
    # -------------------------------------------------------------------------------------------------------

    async def totals(self) -> Totals:
        """Return the counters."""
        ...

    async def audit(self) -> Audit:
        """Count both sides of the conservation law at one moment."""
        ...

    async def queues(self) -> list[QueueStat]:
        """Return every ledger queue's depth, limit, oldest age and consumer."""
        ...

    async def peek(self, key: str) -> list[bytes]:
        """Return the stored bytes of a chunk id (chunk, then its scores) for ``headrace peek``;
        empty when unknown.
        """
        ...

    async def aclose(self) -> None:
        """Release connections. Repeated calls do nothing."""
        ...
