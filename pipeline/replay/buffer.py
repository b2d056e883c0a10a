"""The replay contract: what the durable ledger promises between sampling and learning.

One state machine, two implementations: ``pipeline.replay.memory`` (in this process) and ``pipeline.replay.redis`` (Lua
scripts, one per transition). One contract suite runs on both.

    admit ──> open ──> leased ──> finished ──> ready ──> claimed ──> trained
                ^         │           │           │          │
                └─────────┴───────────┴───────────┴──────────┴──> dropped(reason)

*Consumes* chunks, scores and claims. *Produces* leases for generators, work for scorers, units for the learner, and
finished trajectories for the value worker.
*Waits for* nothing: every call returns at once, with a refusal that names its reason when nothing can be given.

Units. The algorithm's unit is what the learner claims: a ``group`` (DAPO, GRPO), a ``trajectory`` (VAPO, PPO) or a
``chunk`` (T-PPO). Credit is counted in chunks when the unit is the chunk, else in trajectories, granted a whole group at
a time. Admission holds ``trained + claimed + ready + running + granted <= (eta + v + 1) * B + surplus`` with ``v`` the
published policy version, ``B`` the units per update, ``surplus = floor((oversampling - 1) * B)``; a dropped unit leaves
the sum, which is how its credit returns.

Conservation. For groups, trajectories and response tokens, at every moment:
``admitted = trained + dropped(by reason) + in flight``. ``audit`` counts the right-hand side by walking what is stored,
not by a counter that could agree with itself.

Critics. With ``value_training`` finished trajectories are kept for the value worker besides, each until it has trained on it:
claimed and settled like units, by claims of its own, under the same law: admitted = trained + dropped + in flight.

Exactly-once. Delivery is at least once and every write is keyed: a chunk that is there already, a field that is written
already, a claim that is settled already change nothing. A call by an incarnation that is no longer the newest of its
worker raises ``Fenced`` and has no effect; so does a chunk by a generator that lost the trajectory's lease (it gets
``WriteStatus.FENCED``, since others of its trajectories may be fine).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, Protocol

from protocol.ids import ChunkId, Incarnation, TrajectoryId
from protocol.trajectory import Field, RewardScore, Score, TrajectoryChunk, ValueScore


class Unit(StrEnum):
    """What the learner claims at once."""

    GROUP = "group"
    TRAJECTORY = "trajectory"
    CHUNK = "chunk"


class DropReason(StrEnum):
    """Why admitted work is not trained on. Every drop has exactly one."""

    STALE = "stale"
    """Its oldest token is more than eta versions behind the learner."""
    NO_SIGNAL = "no_signal"
    """Every member of the group has the same raw accuracy, so no advantage would differ from zero."""
    DEAD_LETTER = "dead_letter"
    """A scorer failed on it as often as allowed; kept with its traceback for a person to read."""
    NON_FINITE = "non_finite"
    """The learner found NaN or infinity in its arrays."""
    CANCELLED = "cancelled"
    """The run was ended with this work unfinished, on request."""
    VALUE_WARMUP = "value_warmup"
    """Claimed while the critic was not good enough for the policy to start."""


SPOILING: Final = frozenset({DropReason.DEAD_LETTER, DropReason.NON_FINITE, DropReason.CANCELLED})
"""Drops after which no critic may learn from a unit's trajectories, either. All others leave them to the value worker."""


class LatePolicy(StrEnum):
    """What the learner does when running work would become too stale by the next update."""

    WAIT = "wait"
    """Wait for it: staleness is bounded by construction and nothing is favoured for being short."""
    DROP = "drop"
    """Go on and drop it when it arrives: faster with heavy tails, biased against long responses."""


class Refusal(StrEnum):
    """Why a lease call gave less than was asked for."""

    NO_CREDIT = "no_credit"
    """Staleness bound reached: the learner must settle or drop something first."""
    EXHAUSTED = "exhausted"
    """Every prompt of every epoch is admitted."""
    MEMORY = "memory"
    """The server is over its watermark; scorers and the learner must catch up first."""
    BEHIND = "behind"
    """The caller samples with an older version than the published one; take the weights first. So every unit begins under the
    version that its credit was counted from."""
    CLOSED = "closed"
    """Admission was closed: the run has all the updates it wants, or is stopping."""


@dataclass(frozen=True, slots=True)
class LedgerSpec:
    """What a run's ledger was made with. Reopening with another spec raises LedgerMismatch."""

    run: str
    unit: Unit
    group_size: int
    units_per_update: int
    """B, in credit units: trajectories, or chunks when the unit is the chunk. A multiple of group_size for groups."""
    eta: int
    """Largest allowed version lag."""
    num_prompts: int | None = None
    """Length of the prompt stream (prompts x epochs); None when it is endless."""
    oversampling: float = 1.0
    """At least 1. Work admitted at once over what one update needs, for filters that drop some of it."""
    fields: frozenset[Field] = frozenset({Field.REWARD})
    """Needed before a unit is ready: REWARD on final chunks only, REFERENCE and VALUE on every chunk."""
    signal_filter: bool = False
    """Groups only: drop a group whose members all have the same raw accuracy, at the moment that is known; with
    ``value_training`` when it is complete, since the critic learns from such groups as from others."""
    late: LatePolicy = LatePolicy.WAIT
    data_digest: str = ""
    """Digest of the prompt stream (files, tokeniser, limits, seed), so that every generator reads the same prompts."""
    lease_s: float = 30.0
    """A generator that has not renewed for this long loses its trajectories."""
    scoring_deadline_s: float = 30.0
    """A chunk not scored by then is handed out again by ``overdue``."""
    max_attempts: int = 3
    """Failures of one role on one chunk before the unit is dead-lettered."""
    max_bytes: int | None = None
    """Watermark: admission stops while the store holds more than this."""
    value_training: bool = False
    """Keep every finished, scored training trajectory, with the values it was given, until the value worker has trained on it;
    independent of what becomes of its unit, unless that is dropped for a reason in ``SPOILING``. Needs fields REWARD and VALUE.
    What is kept counts in the bytes that ``max_bytes`` bounds."""
    prompt_filter: bool = False
    """Unit chunk: drop a chunk, for want of signal, at the write that completes it, while two or more members of its group are
    scored and all alike in raw accuracy. A verdict of that moment: later members may score otherwise, and then the
    trajectory's next windows are trained. It decides what is trained, never a baseline, so it biases no gradient."""


@dataclass(frozen=True, slots=True)
class EvaluationRequest:
    """Ask the generators for an evaluation, in a lane of its own that takes no credit."""

    number: int
    """Grows by one an evaluation; its trajectories are ``e<number>.<prompt>.<sample>``."""
    policy_version: int
    """Generators serve at least this version before they begin."""
    num_prompts: int
    samples_per_prompt: int
    temperature: float
    """0 is greedy."""
    top_p: float = 1.0


@dataclass(frozen=True, slots=True)
class EvaluationSample:
    """One scored evaluation response."""

    prompt: int
    sample: int
    accuracy: float
    reward: float
    num_tokens: int
    oldest_version: int
    newest_version: int


@dataclass(frozen=True, slots=True)
class EvaluationState:
    """How far an evaluation is."""

    request: EvaluationRequest
    samples: tuple[EvaluationSample, ...]
    num_failed: int = 0
    """Dead-lettered responses: reported, never counted as wrong."""

    @property
    def is_complete(self) -> bool:
        """Whether every response is scored or has failed for good."""
        return len(self.samples) + self.num_failed >= self.request.num_prompts * self.request.samples_per_prompt


@dataclass(frozen=True, slots=True)
class Lease:
    """The right, for one incarnation, to extend one trajectory."""

    trajectory: TrajectoryId
    next_index: int
    """Index of the chunk to write next."""
    last_chunk: TrajectoryChunk | None
    """The newest chunk in the ledger, from which to go on; None when the trajectory has not begun."""
    evaluation: EvaluationRequest | None = None
    """Set in the evaluation lane."""


@dataclass(frozen=True, slots=True)
class LeaseGrant:
    """Answer to ``lease``: what was given, and why no more."""

    leases: tuple[Lease, ...]
    refusal: Refusal | None = None


class WriteStatus(StrEnum):
    """What became of a write."""

    STORED = "stored"
    DUPLICATE = "duplicate"
    """It is there already; nothing changed."""
    FENCED = "fenced"
    """The writer no longer holds this trajectory; nothing changed."""
    UNKNOWN = "unknown"
    """The chunk is not (or no longer) in the ledger: settled, dropped, or never written; nothing changed."""


@dataclass(frozen=True, slots=True)
class ChunkWrite:
    """Answer to ``write_chunk``."""

    status: WriteStatus
    keeps_lease: bool
    """Whether the writer may extend the trajectory at once. False after a final chunk, after fencing, or (unit chunk) when
    the next window found no credit or its writer has yet to take the published version: the trajectory is then parked and
    leased again, before new prompts."""


@dataclass(frozen=True, slots=True)
class ScoredChunk:
    """A chunk with everything that was added to it."""

    chunk: TrajectoryChunk
    scores: dict[Field, Score]


@dataclass(frozen=True, slots=True)
class ClaimedUnit:
    """One unit of a claim, complete: for a group every member, for a trajectory every chunk, in order."""

    name: str
    """Group number, trajectory id or chunk id, as text."""
    trajectories: tuple[tuple[ScoredChunk, ...], ...]
    """By member, then by chunk index. One chunk when the unit is the chunk."""


@dataclass(frozen=True, slots=True)
class FinishedTrajectory:
    """What the value worker trains on: a whole response, its score, and the values it was given window by window."""

    chunk: TrajectoryChunk
    """The final one: its context and tokens are the whole response."""
    reward: RewardScore
    values: tuple[ValueScore, ...]
    """By chunk; together one value for each response token."""


@dataclass(frozen=True, slots=True)
class FinishedClaim:
    """A value batch leased to the value worker's incarnation until settled or returned."""

    claim_id: str
    trajectories: tuple[FinishedTrajectory, ...]


@dataclass(frozen=True, slots=True)
class Claim:
    """A batch leased to the learner's incarnation until settled or returned."""

    claim_id: str
    policy_version: int
    """The learner's version when it claimed."""
    units: tuple[str, ...]


class ClaimWait(StrEnum):
    """Why ``claim`` gave nothing."""

    NOT_ENOUGH = "not_enough"
    """Fewer fresh ready units than an update needs, more are on the way."""
    LATE_WORK = "late_work"
    """There are enough, but running work would become stale by this update and the policy is to wait for it."""
    STARVED = "starved"
    """The prompt stream is exhausted and all that is in flight is ready: an update can never fill again."""


@dataclass(frozen=True, slots=True)
class ClaimRefused:
    """What the learner waits for."""

    wait: ClaimWait
    num_ready: int
    num_needed: int
    oldest_running: str | None = None
    """The unit that everything waits for: oldest by admission among those not ready."""


@dataclass(frozen=True, slots=True)
class Balance:
    """One line of the conservation law, in one currency (groups, trajectories or tokens)."""

    admitted: int
    trained: int
    dropped: dict[str, int] = field(default_factory=dict[str, int])
    in_flight: dict[str, int] = field(default_factory=dict[str, int])
    """Counted by walking the store: open, leased, finished, ready, claimed."""

    @property
    def difference(self) -> int:
        """Admitted minus all the rest; anything but 0 is a bug."""
        return self.admitted - self.trained - sum(self.dropped.values()) - sum(self.in_flight.values())


@dataclass(frozen=True, slots=True)
class Audit:
    """Both sides of the conservation law at one moment."""

    groups: Balance
    trajectories: Balance
    tokens: Balance
    finished: Balance = field(default_factory=lambda: Balance(0, 0))
    """What the value worker may claim: admitted once finished, scored and valued; trained once settled by it; in flight while
    waiting or claimed."""

    @property
    def balances(self) -> bool:
        """Whether all differences are zero."""
        return not any(balance.difference for balance in (self.groups, self.trajectories, self.tokens, self.finished))


@dataclass(frozen=True, slots=True)
class QueueStat:
    """One ledger queue, for ``headrace queues``."""

    name: str
    depth: int
    limit: int | None
    oldest_age_s: float | None
    waiting_for: str
    """Who empties it: ``generator``, ``reward``, ``learner`` ..."""


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """Work that a role could not do as often as it was allowed to try."""

    chunk: str
    role: str
    worker: str
    error: str
    """The last traceback."""
    num_attempts: int
    at_s: float


@dataclass(frozen=True, slots=True)
class Totals:
    """The counters that bound staleness and describe progress, in credit units unless named otherwise."""

    policy_version: int
    credit_used: int
    """trained + claimed + ready + running + granted"""
    credit_limit: int
    num_ready_units: int
    num_running: int
    num_groups_admitted: int
    num_groups_dropped: dict[str, int]
    """By reason."""
    num_tokens_generated: int
    num_tokens_trained: int
    is_closed: bool
    is_exhausted: bool


class ReplayBuffer(Protocol):
    """The durable ledger. Every method is one atomic transition.

    All methods raise LedgerUnavailable when no server answers, and those that take an incarnation raise Fenced when it is
    not the newest of its worker.
    """

    async def open(self, spec: LedgerSpec) -> None:
        """Create the run's ledger, or join it. Raises LedgerMismatch, naming the differing settings, when specs differ."""
        ...

    # -- generation ----------------------------------------------------------------------------------------------------

    async def lease(self, who: Incarnation, *, max_trajectories: int, policy_version: int | None = None) -> LeaseGrant:
        """Give ``who``, which samples with ``policy_version`` (None: with the published one), trajectories to work on.

        In this order, up to ``max_trajectories``: evaluation; training trajectories that nobody holds (their generator died or
        drained, or they were parked at a window), oldest first; then new groups, each admitted whole while there is credit
        (members over the limit stay open for the next caller).
        """
        ...

    async def renew(self, who: Incarnation) -> None:
        """Say that ``who`` still works on all that it holds."""
        ...

    async def give_back(self, who: Incarnation, trajectories: tuple[TrajectoryId, ...] | None = None) -> int:
        """Open these trajectories (all that ``who`` holds when None) for others at once; return how many."""
        ...

    async def write_chunk(self, who: Incarnation, chunk: TrajectoryChunk) -> ChunkWrite:
        """Store a chunk once, under its own key, and index it for its scorers.

        Raises LedgerFull when the server refuses writes; nothing has then changed and the caller may repeat.
        """
        ...

    # -- scoring -------------------------------------------------------------------------------------------------------

    async def write_score(self, who: Incarnation, chunk: ChunkId, score: Score) -> WriteStatus:
        """Fill a field of a chunk once. The write that completes a unit makes it ready, or drops it for want of signal."""
        ...

    async def overdue(self, who: Incarnation, field: Field, *, max_chunks: int) -> list[TrajectoryChunk]:
        """Hand out chunks whose ``field`` is past its deadline, oldest first, and move their deadlines on."""
        ...

    async def fail_score(self, who: Incarnation, chunk: ChunkId, field: Field, error: str) -> bool:
        """Report that scoring failed, with a traceback. The chunk is due again at once; after ``max_attempts`` its unit (for
        a group: the whole group) is dropped as a dead letter. Returns whether it was."""
        ...

    async def dead_letters(self, *, limit: int = 100) -> list[DeadLetter]:
        """Return the newest dead letters first."""
        ...

    # -- learning ------------------------------------------------------------------------------------------------------

    async def claim(self, who: Incarnation, *, policy_version: int) -> Claim | ClaimRefused:
        """Claim one update's units in order of admission, after dropping ready units that are too stale for
        ``policy_version``."""
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

    async def settle(self, who: Incarnation, claims: tuple[str, ...]) -> int:
        """Mark these claims trained and forget their data; return how many were not settled before. Idempotent."""
        ...

    async def recover(self, who: Incarnation, applied: tuple[str, ...]) -> int:
        """Called once by a new learner incarnation: settle the claims whose effect its checkpoint holds, return every other
        claim's units to ready. Returns how many units came back."""
        ...

    async def claim_finished(self, who: Incarnation, *, num_trajectories: int) -> FinishedClaim | int:
        """Claim exactly ``num_trajectories`` finished ones for the value model, in order of admission; or return how many there
        are when they are fewer. Each is claimed once, whatever becomes of its unit. A claim whose reply was lost is given
        again, less what was discarded since. Raises LedgerError without ``LedgerSpec.value_training``."""
        ...

    async def settle_finished(self, who: Incarnation, claims: tuple[str, ...]) -> int:
        """Forget trained value batches; return how many were not settled before. Idempotent."""
        ...

    async def recover_finished(self, who: Incarnation, applied: tuple[str, ...]) -> int:
        """Called once by a new value incarnation: settle what its checkpoint holds, return the rest. Returns how many
        trajectories came back."""
        ...

    async def close_admission(self, who: Incarnation) -> None:
        """Admit nothing new from now on: the run has all the updates that it wants."""
        ...

    async def cancel_in_flight(self, who: Incarnation, reason: DropReason = DropReason.CANCELLED) -> int:
        """Drop everything that is not trained; return how many groups. Used at the end of a finished run."""
        ...

    # -- evaluation ----------------------------------------------------------------------------------------------------

    async def request_evaluation(self, who: Incarnation, request: EvaluationRequest) -> None:
        """Open an evaluation's trajectories. A repeat of the same number changes nothing."""
        ...

    async def evaluation(self, number: int) -> EvaluationState | None:
        """Return how far an evaluation is; None when it was never requested."""
        ...

    # -- looking -------------------------------------------------------------------------------------------------------

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
        """Return the stored bytes of a chunk id (chunk, then its scores) for ``headrace peek``; empty when unknown."""
        ...

    async def aclose(self) -> None:
        """Release connections. Repeated calls do nothing."""
        ...
