"""The ledger's contract: what it promises to generators, scorers and the learner.

``pipeline.ledger.redis.ledger`` implements it with one Lua script per transition. The tests have the
same state machine in memory as an oracle, and one contract suite runs on both. Every call returns at
once; when there is nothing to give, the result says why.

    admit ──> open ──> leased ──> finished ──> ready ──> claimed ──> trained
                ^         │           │           │          │
                └─────────┴───────────┴───────────┴──────────┴──> dropped(reason)

Units. The learner claims the algorithm's unit: a ``group`` (DAPO, GRPO), a ``trajectory`` (VAPO,
PPO) or a ``chunk`` (T-PPO). Credit counts chunks if the unit is the chunk, else trajectories, and is
granted for a whole group at once. Admission keeps ``trained + claimed + ready + running + granted
<= (eta + v + 1) * B + surplus``. ``v`` is the number of updates in the published policy version
(``pipeline.ledger.version_history``), ``B`` the units per update, and
``surplus = floor((oversampling - 1) * B)``. A dropped unit leaves the sum, so its credit returns.

Conservation. For groups, trajectories and response tokens, at every moment
``admitted = trained + dropped(by reason) + in flight``. ``audit`` counts work in flight by walking
the stored data, so that a counter cannot merely agree with itself.

Environments. A chunk that ends a turn (``FinishReason.TURN``) ends its writer's lease, and the trajectory
waits, held by nobody, until its ``Turn`` is written. Then it is open again (with unit chunk, parked), or, if
the turn is the last, finished: the chunk is its final one, due for the reward at once. An *opening* chunk has
no tokens and needs its turn only; it dates no unit, and as a unit it leaves with its turn, without signal.

Critics. With ``value_training``, finished trajectories are also stored until the value worker has
trained on them. It claims and settles them with separate claims, under the same rules.

Exactly once. Delivery is at least once and every write is keyed: repeating the write of a chunk, a
field or a settlement changes nothing. Calls that hand work out or take it back are numbered, so a
call whose reply was lost may be repeated, and a late copy of it changes nothing. The exceptions are
``renew`` and ``extend_scoring``, which only move a deadline again.

A call by an incarnation that is not its worker's newest raises ``Fenced`` and has no effect. A
chunk from a generator that lost its lease gets ``WriteStatus.FENCED``."""

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
    """The durable ledger. Every method is one atomic transition, except those that may touch a lot of work:
    ``audit``, ``settle``, ``return_claim``, ``recover`` and ``cancel_in_flight``. On a server these go
    unit by unit, and other calls run in between; each unit is handled whole and once. If the caller dies
    half-way, its successor's ``recover``, or its own ``cancel_in_flight``, does the rest.

    Every method raises LedgerUnavailable when no server answers. Methods with an incarnation raise Fenced
    when it is not its worker's newest."""

    async def open(self, spec: LedgerSpec) -> None:
        """Create the run's ledger, or join it. Raises LedgerMismatch if it has other settings."""

    # -- generation ------------------------------------------------------------------------------

    async def lease(self, who: Incarnation, *, max_trajectories: int, policy_version: int | None = None) -> LeaseGrant:
        """Lease up to ``max_trajectories`` to ``who``, which samples with ``policy_version`` (None: the
        published one).

        Evaluation comes first, then open training trajectories, oldest first (their generator ended, they were
        parked at a window, or their environment has answered). Then new groups are admitted whole, while there
        is credit and admission is not paused. Members beyond the limit stay open for the next caller."""
        ...

    async def renew(self, who: Incarnation) -> None:
        """Extend the lease on everything that ``who`` holds."""

    async def give_back(self, who: Incarnation, trajectories: tuple[TrajectoryId, ...] | None = None) -> int:
        """Reopen these trajectories (None: all that ``who`` holds) at once; return how many."""
        ...

    async def write_chunk(self, who: Incarnation, chunk: TrajectoryChunk, encoded: Encoded | None = None) -> ChunkWrite:
        """Store a chunk once, under its own key, and index it for its scorers.

        ``encoded`` is the encoded chunk, if the caller has it. Raises LedgerFull when the server refuses
        writes; then nothing has changed and the call may be repeated."""
        ...

    # -- scoring ---------------------------------------------------------------------------------

    async def write_score(self, who: Incarnation, chunk: ChunkId, score: Score) -> WriteStatus:
        """Write a field of a chunk once. The write that completes a unit makes it ready, or drops it for lack
        of signal. A ``Turn`` opens its trajectory again, or finishes it. Guidance before its reward returns
        ``WriteStatus.UNKNOWN``, like a score that came too late."""
        ...

    async def overdue(self, who: Incarnation, field: Field, *, max_chunks: int) -> list[ScoredChunk]:
        """Return chunks whose ``field`` is overdue, oldest first, and extend their deadlines.

        Guidance is overdue as soon as the reward is written, and its chunks come with that reward; the reward
        is overdue as soon as the last turn is written, and its chunks come with that turn if there is one.
        Chunks of other fields come without scores."""
        ...

    async def finished_group(self, who: Incarnation, group: int, *, num_members: int) -> list[TrajectoryChunk]:
        """Hand ``who``, which judges whole groups, the final chunks of a training group, by member, each with
        its last turn if it has one.

        Returns nothing until all ``num_members`` have ended, if no member lacks a reward, or while another
        scorer has the group: until its deadline, a failure, or that scorer is fenced. Members that were
        settled or dropped, or that never got a verdict, are left out."""
        ...

    async def extend_scoring(self, who: Incarnation, field: Field, chunks: tuple[ChunkId, ...]) -> None:
        """Extend the deadlines of chunks that ``who`` is scoring, and of groups that it was handed."""

    async def expire_scoring(self, who: Incarnation, field: Field, chunks: tuple[ChunkId, ...]) -> int:
        """Make chunks due at once because the scorer to which ``who`` sent them is lost.

        Returns how many were not due before. Chunks that are gone, or have the field, are skipped."""
        ...

    async def spend(self, who: Incarnation, name: str, *, limit: int) -> bool:
        """Spend one of the run's ``limit`` uses of ``name``; return whether one was left."""
        ...

    async def fail_score(self, who: Incarnation, chunk: ChunkId, field: Field, error: str) -> bool:
        """Report a scorer's failure, with its traceback. The chunk is due again at once. Returns whether it
        is now a dead letter, which it becomes after ``max_attempts`` failures.

        A dead letter's unit is dropped, except that a group that lacks a reward or a turn goes on without that
        member: its trajectory and tokens are dropped as a dead letter when the group is trained. The group is
        dropped when fewer than two members have a verdict or may still get one. With unit chunk, the trajectory
        ends with a chunk that leaves without its turn."""
        ...

    async def dead_letters(self, *, limit: int = 100) -> list[DeadLetter]:
        """Return dead letters, newest first."""
        ...

    # -- learning --------------------------------------------------------------------------------

    async def claim(self, who: Incarnation, *, policy_version: int) -> Claim | ClaimRefused:
        """Claim one update's units, in order of admission. Ready units that are too stale for
        ``policy_version`` are dropped first."""
        ...

    async def fetch(self, claim: Claim) -> list[ClaimedUnit]:
        """Read everything that a claim holds, in the claim's order."""
        ...

    async def drop(
        self, who: Incarnation, claim: Claim, unit: str, reason: DropReason, letter: UnitLetter | None = None
    ) -> None:
        """Drop one unit from a claim; its credit returns. ``letter`` also records it as a dead letter, so
        that its prompt can be admitted again."""

    async def return_claim(self, who: Incarnation, claim_id: str) -> int:
        """Make a claim's units ready again and return how many; 0 when there is no such claim."""
        ...

    async def advance(self, who: Incarnation, policy_version: int) -> None:
        """Make ``policy_version`` the one from which admission counts. It only grows."""

    async def settle(self, who: Incarnation, claims: tuple[str, ...], *, num_updates: int | None = None) -> int:
        """Mark these claims trained and delete their data; return how many were not settled before.

        ``num_updates`` is the number of updates in the checkpoint that contains them; :meth:`resume_from`
        needs it."""
        ...

    async def make_durable(self, who: Incarnation) -> bool:
        """Return True once all earlier writes survive the death of the server and its machine.

        Returns False at once if the server cannot confirm that: it has no append-only file, is older than
        Redis 7.2, or denies permission. ``totals`` and ``audit`` count consecutive failures."""
        ...

    async def recover(self, who: Incarnation, applied: tuple[str, ...], *, kept: tuple[str, ...] = ()) -> int:
        """Settle the claims in a new learner's checkpoint and make the units of all others ready again;
        return how many. Each new learner incarnation calls it once.

        Claims in ``kept`` stay claimed: the new learner's weights contain them, but no checkpoint does yet."""
        ...

    async def missing(self, claims: tuple[str, ...]) -> tuple[str, ...]:
        """Return those of these claims (of units or finished trajectories) that are settled, returned, lost
        or incomplete."""
        ...

    async def resume_from(self, who: Incarnation, restart: Restart) -> int:
        """Count credit and staleness from a new learner's weights. Called once, after ``recover``.

        Reopens admission if the run had ended. Units that were settled by updates missing from these weights
        become dropped (``ROLLED_BACK``). Returns the credit that they free: 0 unless a checkpoint was damaged
        or an older one chosen. Raises LedgerError, with nothing changed, when their number is unknown."""
        ...

    async def restarts(self) -> tuple[Restart, ...]:
        """Return all restarts, by version; they map versions to updates."""
        ...

    async def claim_finished(self, who: Incarnation, *, num_trajectories: int) -> FinishedClaim | int:
        """Claim ``num_trajectories`` finished trajectories for the value model, in order of admission; when
        there are fewer, return how many there are.

        Each is claimed once, whatever happens to its unit. A repeated call returns the same claim, less
        discarded trajectories. Raises LedgerError without ``LedgerSpec.value_training``."""
        ...

    async def settle_finished(self, who: Incarnation, claims: tuple[str, ...]) -> int:
        """Delete trained value batches; return how many were not settled before."""
        ...

    async def recover_finished(self, who: Incarnation, applied: tuple[str, ...], *, kept: tuple[str, ...] = ()) -> int:
        """Settle the value claims in a new value worker's checkpoint; return how many trajectories of the
        other claims wait again. Each new value worker incarnation calls it once.

        Claims in ``kept`` stay claimed: the new value model contains them, but no checkpoint does yet."""
        ...

    async def close_admission(self, who: Incarnation) -> None:
        """Admit nothing new from now on: the run has all its updates."""

    async def cancel_in_flight(self, who: Incarnation, reason: DropReason = DropReason.CANCELLED) -> int:
        """Drop all untrained work at the end of a run; return how many groups.

        If the run goes on later, the prompts of groups with nothing trained are admitted again. The value
        worker's claims stay: it has trained on them, and settles them as it drains."""
        ...

    async def take_shown(self, who: Incarnation) -> tuple[ShownResponse, ...]:
        """Return and delete the kept responses of evaluations and of groups without signal, oldest first. Of
        each kind, ``MAX_SHOWN`` are kept between two calls; a lost reply loses some."""
        ...

    # -- evaluation ------------------------------------------------------------------------------

    async def request_evaluation(self, who: Incarnation, request: EvaluationRequest) -> None:
        """Open an evaluation's trajectories. Repeating a number changes nothing."""

    async def evaluation(self, number: int) -> EvaluationState | None:
        """Return an evaluation's progress; None when it was never requested."""
        ...

    # -- views -----------------------------------------------------------------------------------

    async def totals(self) -> Totals: ...

    async def audit(self) -> Audit:
        """Count both sides of the conservation law at one moment. On a server, the *states* of work in flight
        may be as old as the walk took."""
        ...

    async def queues(self) -> list[QueueStat]: ...

    async def peek(self, key: str) -> list[bytes]:
        """Return a chunk's bytes, then those of its scores, for ``headrace ledger peek``; empty if unknown."""
        ...

    async def aclose(self) -> None:
        """Close the connections. Repeated calls do nothing."""
