"""The nouns of the ledger's contract: what the ledger is made with, what it gives out, and what it
answers.

Values only: the promises about them are in ``pipeline.ledger.contract``, which offers every name of
this module as its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from protocol.ids import TrajectoryId
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
    """Every member of the group has the same raw accuracy, so no advantage would
    differ from zero.
    """
    DEAD_LETTER = "dead_letter"
    """A scorer failed on it as often as allowed; kept with its traceback for a person to read."""
    NON_FINITE = "non_finite"
    """The learner found NaN or infinity in its arrays."""
    CANCELLED = "cancelled"
    """The run was ended with this work unfinished, on request."""
    VALUE_WARMUP = "value_warmup"
    """Claimed while the critic was not good enough for the policy to start."""
    ROLLED_BACK = "rolled_back"
    """Trained and settled, and its effect given up: the learner went on from a checkpoint before
    it.
    """


SPOILING: Final = frozenset({DropReason.DEAD_LETTER, DropReason.NON_FINITE, DropReason.CANCELLED})
"""Drops after which no critic may learn from a unit's trajectories, either. All others leave them
to the value worker.
"""


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
    """The caller samples with an older version than the published one; take the weights first. So
    every unit begins under the version that its credit was counted from."""
    CLOSED = "closed"
    """Admission was closed: the run has all the updates it wants, or is stopping."""


@dataclass(frozen=True, slots=True)
class LedgerSpec:
    """What a run's ledger was made with. Reopening with another spec raises LedgerMismatch."""

    run: str
    unit: Unit
    group_size: int
    units_per_update: int
    """B, in credit units: trajectories, or chunks when the unit is the chunk. A multiple of
    group_size for groups.
    """
    eta: int
    """Largest allowed version lag."""
    num_prompts: int | None = None
    """Length of the prompt stream (prompts x epochs); None when it is endless."""
    oversampling: float = 1.0
    """At least 1. Work admitted at once over what one update needs, for filters that drop some of
    it.
    """
    fields: frozenset[Field] = frozenset({Field.REWARD})
    """Needed before a unit is ready: REWARD on final chunks only, REFERENCE and VALUE on every
    chunk.
    """
    signal_filter: bool = False
    """Groups only: drop a group whose members all have the same raw accuracy, at the moment that is
    known; with ``value_training`` when it is complete, since the critic learns from such groups as
    from others."""
    late: LatePolicy = LatePolicy.WAIT
    data_digest: str = ""
    """Digest of the prompt stream (files, tokeniser, limits, seed), so that every generator reads
    the same prompts.
    """
    lease_s: float = 30.0
    """A generator that has not renewed for this long loses its trajectories."""
    scoring_deadline_s: float = 30.0
    """A chunk not scored by then is handed out again by ``overdue``."""
    max_attempts: int = 3
    """Failures of one role on one chunk before the unit is dead-lettered."""
    max_bytes: int | None = None
    """Watermark: admission stops while the store holds more than this."""
    value_training: bool = False
    """Keep every finished, scored training trajectory, with the values it was given, until the
    value worker has trained on it; independent of what becomes of its unit, unless that is dropped
    for a reason in ``SPOILING``. Needs fields REWARD and VALUE. What is kept counts in the bytes
    that ``max_bytes`` bounds."""


@dataclass(frozen=True, slots=True)
class Restart:
    """Weights that a learner published when it began, restored or new
    (``pipeline.ledger.version_history``).
    """

    policy_version: int
    """Their new number, above all that were published before."""
    num_updates: int
    """In them."""


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
    prompt: int
    """Its prompt's place in the stream (in the evaluation lane, in the evaluation set). Not always
    the group's number: a dead letter's prompt may be admitted again."""
    last_chunk: TrajectoryChunk | None
    """The newest chunk in the ledger, from which to go on; None when the trajectory
    has not begun.
    """
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
    """The chunk is not (or no longer) in the ledger: settled, dropped, or never written; nothing
    changed.
    """


@dataclass(frozen=True, slots=True)
class ChunkWrite:
    """Answer to ``write_chunk``."""

    status: WriteStatus
    keeps_lease: bool
    """Whether the writer may extend the trajectory at once. False after a final chunk, after
    fencing, or (unit chunk) when the next window found no credit or its writer has yet to take the
    published version: the trajectory is then parked and leased again, before new prompts."""


@dataclass(frozen=True, slots=True)
class ScoredChunk:
    """A chunk with everything that was added to it."""

    chunk: TrajectoryChunk
    scores: dict[Field, Score]


@dataclass(frozen=True, slots=True)
class ClaimedUnit:
    """One unit of a claim, complete: for a group every member, for a trajectory every chunk, in
    order.
    """

    name: str
    """Group number, trajectory id or chunk id, as text."""
    trajectories: tuple[tuple[ScoredChunk, ...], ...]
    """By member, then by chunk index. One chunk when the unit is the chunk."""


@dataclass(frozen=True, slots=True)
class FinishedTrajectory:
    """What the value worker trains on: a whole response, its score, and the values it was given
    window by window.
    """

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
    """There are enough, but running work would become stale by this update and the policy is to
    wait for it.
    """
    STARVED = "starved"
    """The prompt stream is exhausted and all that is in flight is ready: an update can never fill
    again.
    """


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
    """What the value worker may claim: admitted once finished, scored and valued; trained once
    settled by it; in flight while waiting or claimed."""
    tokens_stored: dict[str, int] = field(default_factory=dict[str, int])
    """Tokens of all chunks ever stored, evaluation included, by the incarnation that wrote them."""
    num_unflushed: int = 0
    """Checkpoints in a row, up to the last, for which the server could not say that its file is on
    its disk.
    """

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
    prompt: int
    """Its prompt's place in the stream, by which it can be admitted again."""


@dataclass(frozen=True, slots=True)
class Totals:
    """The counters that bound staleness and describe progress, in credit units unless named
    otherwise.
    """

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
    """Every prompt is admitted, and none waits to be admitted again."""
    num_unflushed: int = 0
    """Checkpoints in a row, up to the last, for which the server could not say that its file is on
    its disk.
    """
