"""The ledger's contract: its promises between sampling and learning.

``pipeline.ledger.redis.ledger`` implements it by one Lua script per transition. The tests have the
same state machine in memory, as an oracle; one contract suite runs on both. Every call returns at
once, with a refusal that names its reason when nothing can be given.

    admit ──> open ──> leased ──> finished ──> ready ──> claimed ──> trained
                ^         │           │           │          │
                └─────────┴───────────┴───────────┴──────────┴──> dropped(reason)

Units. The learner claims the algorithm's unit: a ``group`` (DAPO, GRPO), a ``trajectory`` (VAPO,
PPO) or a ``chunk`` (T-PPO). Credit counts chunks if the unit is the chunk, else trajectories. It is
granted for a whole group at once. Admission keeps ``trained + claimed + ready + running + granted
<= (eta + v + 1) * B + surplus``. ``v`` is the updates in the published policy version
(``pipeline.ledger.version_history``), ``B`` the units per update, and
``surplus = floor((oversampling - 1) * B)``. A dropped unit leaves the sum: so its credit returns.

Conservation. For groups, trajectories and response tokens, at every moment:
``admitted = trained + dropped(by reason) + in flight``. ``audit`` counts the right-hand side by
walking the stored data, not by a counter that could agree with itself.

Critics. With ``value_training`` finished trajectories are also stored for the value worker, until
it has trained on them. It claims and settles them by separate claims, under the same rules.

Exactly-once. Delivery is at least once and every write is keyed. A stored chunk, a written field
and a settled claim do not change on a repeat. Calls that give something out or take it back are
numbered. So a call whose reply was lost may be repeated, and a late copy of it changes nothing. The
exceptions are ``renew`` and ``extend_scoring``, which move a deadline again.

A call by an incarnation that is not its worker's newest raises ``Fenced`` and has no effect. A
chunk by a generator that lost its lease gets ``WriteStatus.FENCED``, since others may hold."""

from __future__ import annotations

from typing import Protocol

from pipeline.ledger.types import (
    Audit,
    ChunkWrite,
    Claim,
    ClaimedUnit,
    ClaimRefused,
    DeadLetter,
    DropReason,
    EvaluationRequest,
    EvaluationState,
    FinishedClaim,
    LeaseGrant,
    LedgerSpec,
    QueueStat,
    Restart,
    ScoredChunk,
    ShownResponse,
    Totals,
    UnitLetter,
    WriteStatus,
)
from protocol.codec import Encoded
from protocol.ids import ChunkId, Incarnation, TrajectoryId
from protocol.trajectory import Field, Score, TrajectoryChunk


class Ledger(Protocol):
    """The durable ledger. Every method is one atomic transition, but for those that may walk over
    much: ``audit``, ``settle``, ``return_claim``, ``recover`` and ``cancel_in_flight``. On a server
    they go unit by unit, each whole and once, and other calls go on between. A caller that dies
    half-way leaves the rest to its successor's ``recover``, or its own ``cancel_in_flight``.

    Every method raises LedgerUnavailable when no server answers. Methods with an incarnation raise
    Fenced when it is not its worker's newest."""

    async def open(self, spec: LedgerSpec) -> None:
        """Create the run's ledger, or join it. Raises LedgerMismatch for other settings."""

    # -- generation ------------------------------------------------------------------------------

    async def lease(self, who: Incarnation, *, max_trajectories: int, policy_version: int | None = None) -> LeaseGrant:
        """Lease up to ``max_trajectories`` to ``who``, which samples with ``policy_version``.

        Evaluation comes first. Then come open training trajectories, oldest first: their generator
        ended, or they were parked at a window. Then new groups are admitted whole, while there is
        credit and no operator has paused admission. Members over the limit stay open for the next
        caller. ``policy_version`` None means the published one."""
        ...

    async def renew(self, who: Incarnation) -> None:
        """Extend the lease on all that ``who`` holds."""

    async def give_back(self, who: Incarnation, trajectories: tuple[TrajectoryId, ...] | None = None) -> int:
        """Open these trajectories (None: all that ``who`` holds) at once; return their number."""
        ...

    async def write_chunk(self, who: Incarnation, chunk: TrajectoryChunk, encoded: Encoded | None = None) -> ChunkWrite:
        """Store a chunk once, under its own key, and index it for its scorers.

        ``encoded`` is the encoded chunk, if the caller has it. Raises LedgerFull when the server
        refuses writes; nothing has then changed and the caller may repeat."""
        ...

    # -- scoring ---------------------------------------------------------------------------------

    async def write_score(self, who: Incarnation, chunk: ChunkId, score: Score) -> WriteStatus:
        """Fill a field of a chunk once. A write that completes a unit makes it ready, or drops it
        for lack of signal. Guidance before its reward is ``WriteStatus.UNKNOWN``."""
        ...

    async def overdue(self, who: Incarnation, field: Field, *, max_chunks: int) -> list[ScoredChunk]:
        """Return chunks whose ``field`` is overdue, oldest first; extend their deadlines.

        Guidance is overdue at once when its reward is written, and is given with that reward. No
        other field is given with scores."""
        ...

    async def finished_group(self, who: Incarnation, group: int, *, num_members: int) -> list[TrajectoryChunk]:
        """Give a training group to ``who``, which judges it: its final chunks, by member, once all
        of its ``num_members`` have ended; before, nothing. Nothing as well for a group that lacks
        no reward, or is given already: until its deadline, a failure or that scorer's fence.
        Members that were settled or dropped since, or never got a verdict, are left out."""
        ...

    async def extend_scoring(self, who: Incarnation, field: Field, chunks: tuple[ChunkId, ...]) -> None:
        """Extend the deadlines of chunks that ``who`` scores, and of groups that it was given."""

    async def expire_scoring(self, who: Incarnation, field: Field, chunks: tuple[ChunkId, ...]) -> int:
        """Make chunks due at once whose scorer is lost; return how many were not due before.

        ``who`` has sent them there. Chunks that are gone, or have the field, are left out."""
        ...

    async def spend(self, who: Incarnation, name: str, *, limit: int) -> bool:
        """Take one of ``limit`` of ``name``, for the whole run; return whether one was left."""
        ...

    async def fail_score(self, who: Incarnation, chunk: ChunkId, field: Field, error: str) -> bool:
        """Report a scorer's failure, with a traceback. The chunk is due again at once. After
        ``max_attempts`` it is a dead letter; returns whether it is.

        The unit of a dead letter is dropped. A group is not, for a reward: it goes on without that
        member, whose trajectory and tokens are dropped as a dead letter when the group is trained.
        It is dropped when fewer than two members are left that have a verdict or may get one."""
        ...

    async def dead_letters(self, *, limit: int = 100) -> list[DeadLetter]:
        """Return the newest dead letters first."""
        ...

    # -- learning --------------------------------------------------------------------------------

    async def claim(self, who: Incarnation, *, policy_version: int) -> Claim | ClaimRefused:
        """Claim one update's units in order of admission, after dropping ready units that are too
        stale for ``policy_version``."""
        ...

    async def fetch(self, claim: Claim) -> list[ClaimedUnit]:
        """Read everything that a claim holds, in the claim's order."""
        ...

    async def drop(
        self, who: Incarnation, claim: Claim, unit: str, reason: DropReason, letter: UnitLetter | None = None
    ) -> None:
        """Drop one unit out of a claim; its credit returns. With ``letter`` it is a dead letter:
        its prompt can be admitted again."""

    async def return_claim(self, who: Incarnation, claim_id: str) -> int:
        """Return a claim's units to ready, and their number; 0 when it is not there."""
        ...

    async def advance(self, who: Incarnation, policy_version: int) -> None:
        """Make ``policy_version`` the one that admission counts from. It only grows."""

    async def settle(self, who: Incarnation, claims: tuple[str, ...], *, num_updates: int | None = None) -> int:
        """Mark these claims trained and forget their data; return how many were not yet settled.

        ``num_updates`` is that of the checkpoint that contains them; :meth:`resume_from` needs it.
        """
        ...

    async def make_durable(self, who: Incarnation) -> bool:
        """Return True once all earlier writes survive the death of the server and its machine.

        Returns False at once if the server cannot confirm it: no append-only file, older than Redis
        7.2, or no permission. ``totals`` and ``audit`` count such results in a row."""
        ...

    async def recover(self, who: Incarnation, applied: tuple[str, ...], *, kept: tuple[str, ...] = ()) -> int:
        """Settle the claims in a new learner's checkpoint; return every other claim's units to
        ready, and their number. Called once by each new learner incarnation.

        ``kept`` stay claimed: their effect is in the new learner's weights, but on no disk yet."""
        ...

    async def missing(self, claims: tuple[str, ...]) -> tuple[str, ...]:
        """Return those of these claims, of units or of finished trajectories, that are not there or
        not whole: settled, returned or lost."""
        ...

    async def resume_from(self, who: Incarnation, restart: Restart) -> int:
        """Count credit and staleness from a new learner's weights. Called once, after ``recover``.

        Reopens the admission of a run that had ended. Units settled by updates that these weights
        do not contain become dropped, ``ROLLED_BACK``; their credit returns. Returns that credit: 0
        unless a checkpoint was damaged or an older one chosen. Raises LedgerError, with nothing
        changed, when their number is unknown."""
        ...

    async def restarts(self) -> tuple[Restart, ...]:
        """Return all restarts, by version; they map versions to updates."""
        ...

    async def claim_finished(self, who: Incarnation, *, num_trajectories: int) -> FinishedClaim | int:
        """Claim ``num_trajectories`` finished ones for the value model, in order of admission; or
        return how many there are when they are fewer. Each is claimed once, whatever becomes of its
        unit. A repeated claim returns the same, less discarded ones. Raises LedgerError without
        ``LedgerSpec.value_training``."""
        ...

    async def settle_finished(self, who: Incarnation, claims: tuple[str, ...]) -> int:
        """Forget trained value batches; return how many were not yet settled."""
        ...

    async def recover_finished(self, who: Incarnation, applied: tuple[str, ...], *, kept: tuple[str, ...] = ()) -> int:
        """Settle the value claims in a new value worker's checkpoint; return how many trajectories
        of the others wait again. Called once by each new value incarnation.

        ``kept`` stay claimed: their effect is in the new value model, but on no disk yet."""
        ...

    async def close_admission(self, who: Incarnation) -> None:
        """Admit nothing new from now on: the run has all its updates."""

    async def cancel_in_flight(self, who: Incarnation, reason: DropReason = DropReason.CANCELLED) -> int:
        """Drop all work that is not trained, at the end of a run; return how many groups.

        Prompts of whose groups nothing was trained are admitted again if the run goes on.
        Claims of the value worker stay: it has trained on them, and settles them as it drains."""
        ...

    async def take_shown(self, who: Incarnation) -> tuple[ShownResponse, ...]:
        """Return responses of evaluations and of groups without signal, oldest first, and forget
        them. Of each kind ``MAX_SHOWN`` are kept between two calls; a lost answer loses some."""
        ...

    # -- evaluation ------------------------------------------------------------------------------

    async def request_evaluation(self, who: Incarnation, request: EvaluationRequest) -> None:
        """Open an evaluation's trajectories. A repeat of the same number changes nothing."""

    async def evaluation(self, number: int) -> EvaluationState | None:
        """Return an evaluation's progress; None when it was never requested."""
        ...

    # -- views -----------------------------------------------------------------------------------

    async def totals(self) -> Totals:
        """Return the counters."""
        ...

    async def audit(self) -> Audit:
        """Count both sides of the conservation law at one moment. On a server the *states* of work
        in flight may be older by the time that the walk took."""
        ...

    async def queues(self) -> list[QueueStat]:
        """Return every ledger queue's depth, limit, oldest age and consumer."""
        ...

    async def peek(self, key: str) -> list[bytes]:
        """Return a chunk's bytes, then its scores', for ``headrace ledger peek``; empty when unknown."""
        ...

    async def aclose(self) -> None:
        """Release connections. Repeated calls do nothing."""
