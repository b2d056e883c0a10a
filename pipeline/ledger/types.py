"""The data types of the ledger's contract (``pipeline.ledger.contract``)."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from protocol.ids import ChunkId, TrajectoryId
from protocol.trajectory import Field, RewardScore, Score, TrajectoryChunk, Turn, ValueScore


class Unit(StrEnum):
    """What the learner claims as a whole."""

    GROUP = "group"
    TRAJECTORY = "trajectory"
    CHUNK = "chunk"


class DropReason(StrEnum):
    """Why admitted work was not trained on. Every drop has exactly one reason."""

    STALE = "stale"
    """Its oldest token is more than eta versions behind the learner."""
    NO_SIGNAL = "no_signal"
    """All members of the group have the same raw accuracy, so every advantage would be zero. Or all responses
    of the unit are masked, or the learner found no token to train on in a whole claim."""
    DEAD_LETTER = "dead_letter"
    """A scorer failed on it ``max_attempts`` times; stored with its traceback for a person. A group is
    dropped when fewer than two of its members have a verdict or may still get one."""
    NON_FINITE = "non_finite"
    """Twice, the learner found NaN or infinity in its arrays or in a step on it, or the step was a spike."""
    CANCELLED = "cancelled"
    """The run was ended on request, with this work unfinished."""
    VALUE_WARMUP = "value_warmup"
    """Claimed before the critic was good enough for the policy to start."""
    ROLLED_BACK = "rolled_back"
    """Trained and settled, then lost: the learner restarted from an earlier checkpoint."""


class LatePolicy(StrEnum):
    """What the learner does about running work that would be too stale at the next update."""

    WAIT = "wait"
    """Wait for it: staleness is bounded by construction, and short responses gain no advantage."""
    DROP = "drop"
    """Go on, and drop it once it is ready: faster with heavy tails, but biased against long responses."""


class Refusal(StrEnum):
    """Why a lease call returned less than requested."""

    NO_CREDIT = "no_credit"
    """The staleness bound is reached: the learner must settle or drop something first."""
    EXHAUSTED = "exhausted"
    """Every prompt of every epoch has been admitted."""
    MEMORY = "memory"
    """The server is over its watermark; scorers and the learner must catch up first."""
    BEHIND = "behind"
    """The caller samples with an older version than the published one and must load that first. So every unit
    begins under the version that its credit was counted from."""
    CLOSED = "closed"
    """Admission was closed: the run has all its updates, or is stopping."""
    PAUSED = "paused"
    """An operator has paused admission; work in flight goes on."""


REFUSAL_WORDS: Final[dict[Refusal, str]] = {
    Refusal.NO_CREDIT: "the learner to settle or drop work: sampling is as far ahead as staleness allows",
    Refusal.EXHAUSTED: "nothing: every prompt is admitted",
    Refusal.BEHIND: "the published weights",
    Refusal.MEMORY: "the ledger to shrink below its watermark",
    Refusal.CLOSED: "nothing: admission is closed",
    Refusal.PAUSED: "an operator, who has paused admission; `headrace run resume` ends that",
}
"""What a generator waits for after each refusal, for its heartbeat."""


@dataclass(frozen=True, slots=True)
class LedgerSpec:
    """The ledger's fixed settings. Reopening it with others raises LedgerMismatch."""

    run: str
    unit: Unit
    group_size: int
    units_per_update: int
    """B, in credit: trajectories, or chunks (unit chunk). With unit group, a multiple of group_size."""
    eta: int
    """Largest allowed version lag."""
    num_prompts: int | None = None
    """Length of the prompt stream (prompts x epochs); None if it is endless."""
    oversampling: float = 1.0
    """At least 1: work in flight relative to one update's, for filters that drop some of it."""
    fields: frozenset[Field] = frozenset({Field.REWARD})
    """Fields that a ready unit has: REWARD and GUIDANCE on final chunks only, TURN on chunks that end a turn
    (with an environment), the others on every chunk with tokens. GUIDANCE is due once the reward is written,
    never before."""
    signal_filter: bool = False
    """Groups only: drop a group whose members all have one raw accuracy as soon as that is known. With
    ``value_training``, only once the group is complete, since the critic learns from it too."""
    late: LatePolicy = LatePolicy.WAIT
    data_digest: str = ""
    """Digest of the prompt stream: files, tokeniser, limits, seed. All generators read the same stream."""
    lease_s: float = 30.0
    """A generator that has not renewed for this long loses its trajectories."""
    scoring_deadline_s: float = 30.0
    """``overdue`` hands out a chunk again if it is not scored by then."""
    max_attempts: int = 3
    """Failures of one role on one chunk before the chunk is a dead letter."""
    max_bytes: int | None = None
    """Watermark: admission stops while the store holds more than this."""
    value_training: bool = False
    """Keep every finished, scored training trajectory with its values until the value worker has trained on
    it, even after its unit has ended (unless as a dead letter, non-finite or cancelled). Needs the fields
    REWARD and VALUE. These bytes count towards ``max_bytes``."""


@dataclass(frozen=True, slots=True)
class Restart:
    """Weights that a learner published when it started (``pipeline.ledger.version_history``)."""

    policy_version: int
    """Their new number, higher than all earlier ones."""
    num_updates: int


@dataclass(frozen=True, slots=True)
class EvaluationRequest:
    """An evaluation to sample, in a separate lane that takes no credit."""

    number: int
    """Grows by one with each evaluation; its trajectories are ``e<number>.<prompt>.<sample>``."""
    policy_version: int
    """Generators load at least this version before they begin."""
    num_prompts: int
    samples_per_prompt: int
    temperature: float
    """0 is greedy."""
    top_p: float = 1.0
    first_prompt: int = 0
    """Where its prompts start among the held-out prompts of all sets."""
    set: str = ""
    """Name of its evaluation set; empty for that of ``data.evaluation``."""
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stop_strings: tuple[str, ...] = ()
    max_response_tokens: int | None = None
    """None uses the run's limit."""


@dataclass(frozen=True, slots=True)
class EvaluationSample:
    prompt: int
    sample: int
    accuracy: float
    reward: float
    num_tokens: int
    oldest_version: int
    newest_version: int


MAX_SHOWN, MAX_SHOWN_BYTES = 16, 262_144
"""Responses of each kind that are kept for people to read, and the largest chunk kept."""


@dataclass(frozen=True, slots=True)
class ShownResponse:
    """A response that the learner never claims, kept for people to read."""

    kind: str
    """``evaluation``, or why its group was dropped."""
    chunk: TrajectoryChunk
    """The final chunk, which has the text."""
    reward: RewardScore


@dataclass(frozen=True, slots=True)
class EvaluationState:
    request: EvaluationRequest
    samples: tuple[EvaluationSample, ...]
    num_failed: int = 0
    """Dead letters; they are reported, never counted as wrong."""

    @property
    def is_complete(self) -> bool:
        """Whether every response is scored or a dead letter."""
        return len(self.samples) + self.num_failed >= self.request.num_prompts * self.request.samples_per_prompt


@dataclass(frozen=True, slots=True)
class Lease:
    """An incarnation's right to extend a trajectory."""

    trajectory: TrajectoryId
    next_index: int
    prompt: int
    """The prompt's position in its stream or evaluation set. It may differ from the group's number, since a
    dead letter's prompt may be admitted again."""
    last_chunk: TrajectoryChunk | None
    """The newest chunk, from which to continue; None before the first."""
    evaluation: EvaluationRequest | None = None
    """Set in the evaluation lane."""
    turn: Turn | None = None
    """The environment's answer to ``last_chunk``, if that ended a turn; never the last one."""


@dataclass(frozen=True, slots=True)
class LeaseGrant:
    """The result of ``lease``: the leases, and why there are no more."""

    leases: tuple[Lease, ...]
    refusal: Refusal | None = None


class WriteStatus(StrEnum):
    STORED = "stored"
    DUPLICATE = "duplicate"
    """It was already written; nothing changed."""
    FENCED = "fenced"
    """The writer no longer holds this trajectory; nothing changed."""
    UNKNOWN = "unknown"
    """The chunk was settled, dropped, or never written; nothing changed."""


@dataclass(frozen=True, slots=True)
class ChunkWrite:
    status: WriteStatus
    keeps_lease: bool
    """Whether the writer may extend the trajectory at once. False after a final chunk, the end of a turn and
    fencing. With unit chunk also False if the next window gets no credit, or if the writer is behind the published
    version; the trajectory is then parked, and leased again before new prompts."""


@dataclass(frozen=True, slots=True)
class ScoredChunk:
    chunk: TrajectoryChunk
    scores: dict[Field, Score]


@dataclass(frozen=True, slots=True)
class ClaimedUnit:
    """One complete unit of a claim: every member of a group, every chunk of a trajectory."""

    name: str
    """Group number, trajectory id or chunk id, as text."""
    trajectories: tuple[tuple[ScoredChunk, ...], ...]
    """Chunks by member, then by chunk index; a single chunk when that is the unit. A group member whose last
    chunk has no reward never got a verdict, or its environment failed."""


@dataclass(frozen=True, slots=True)
class FinishedTrajectory:
    """A training item of the value worker: a whole response, its reward, and its values by window."""

    chunk: TrajectoryChunk
    """The final chunk; its context and tokens are the whole response."""
    reward: RewardScore
    values: tuple[ValueScore, ...]
    """Values by chunk; together one per sampled token."""


@dataclass(frozen=True, slots=True)
class FinishedClaim:
    """A value batch, claimed by the value worker's incarnation until settled or returned."""

    claim_id: str
    trajectories: tuple[FinishedTrajectory, ...]


@dataclass(frozen=True, slots=True)
class Claim:
    """A batch, claimed by the learner's incarnation until settled or returned."""

    claim_id: str
    policy_version: int
    """The learner's version when it claimed."""
    units: tuple[str, ...]


class ClaimWait(StrEnum):
    NOT_ENOUGH = "not_enough"
    """Too few fresh ready units for an update; more are on the way."""
    LATE_WORK = "late_work"
    """Enough are ready, but running work would become stale, and the policy waits."""
    STARVED = "starved"
    """The prompt stream is exhausted and all work in flight is ready: no further update can fill up."""


@dataclass(frozen=True, slots=True)
class ClaimRefused:
    """Why there is no claim, and how far the next one is."""

    wait: ClaimWait
    num_ready: int
    num_needed: int
    oldest_running: str | None = None
    """The first unit, in order of admission, that is not ready."""


@dataclass(frozen=True, slots=True)
class Balance:
    """The conservation law in one currency: groups, trajectories or tokens."""

    admitted: int
    trained: int
    dropped: dict[str, int] = field(default_factory=dict[str, int])
    in_flight: dict[str, int] = field(default_factory=dict[str, int])
    """Counted by walking the stored data: open, leased, waiting (for an environment), finished, ready, claimed."""

    @property
    def difference(self) -> int:
        """Admitted minus everything else; 0 unless there is a bug."""
        return self.admitted - self.trained - sum(self.dropped.values()) - sum(self.in_flight.values())


@dataclass(frozen=True, slots=True)
class Audit:
    """Both sides of the conservation law at one moment."""

    groups: Balance
    trajectories: Balance
    tokens: Balance
    finished: Balance = field(default_factory=lambda: Balance(0, 0))
    """The value worker's trajectories. Admitted: finished, scored and valued. Trained: settled. In flight:
    waiting or claimed."""
    tokens_stored: dict[str, int] = field(default_factory=dict[str, int])
    """Tokens of all chunks ever stored, evaluation included, by the incarnation that wrote them."""
    num_unflushed: int = 0
    """Consecutive checkpoints, up to the last, that the server did not confirm to be on disk."""

    @property
    def balances(self) -> bool:
        """Whether all differences are zero."""
        return not any(balance.difference for balance in (self.groups, self.trajectories, self.tokens, self.finished))


@dataclass(frozen=True, slots=True)
class QueueStat:
    """One queue of the ledger, for ``headrace ledger queues``."""

    name: str
    depth: int
    limit: int | None
    oldest_age_s: float | None
    waiting_for: str
    """The role that empties it: ``generator``, ``reward``, ``learner`` ..."""


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """Work on which a role failed too often, or on which the learner could not train."""

    chunk: str
    role: str
    """The missing field, or ``learner``."""
    worker: str
    error: str
    num_attempts: int
    at_s: float
    prompt: int
    """Its prompt's position in the stream, to admit it again."""


@dataclass(frozen=True, slots=True)
class UnitLetter:
    """A dead letter for a unit on which the learner cannot train."""

    chunk: ChunkId
    """One of the unit's chunks, to name it."""
    error: str


@dataclass(frozen=True, slots=True)
class Pause:
    """An operator's pause of admission, until the operator ends it."""

    since_s: float
    """When it began: the ledger's clock, seconds since 1970."""
    by: str
    """The operator, as ``user@host``."""
    reason: str = ""
    """The operator's reason; may be empty."""


@dataclass(frozen=True, slots=True)
class Totals:
    """Counters of staleness and progress, in credit unless the name says otherwise."""

    policy_version: int
    credit_used: int
    """trained + claimed + ready + running + granted"""
    credit_limit: int
    num_ready_units: int
    num_running: int
    num_groups_admitted: int
    num_groups_dropped: dict[str, int]
    """Dropped groups by reason."""
    num_tokens_generated: int
    num_tokens_trained: int
    is_closed: bool
    is_exhausted: bool
    """Every prompt is admitted, and none waits for a retry."""
    num_unflushed: int = 0
    """Consecutive checkpoints, up to the last, that the server did not confirm to be on disk."""
    next_group: int = 0
    """Higher than the numbers of all admitted groups."""
    num_trajectories_admitted: int = 0
    credit_trained: int = 0
    """The trained part of ``credit_used``."""
    num_finished_admitted: int = 0
    """Trajectories for the value worker: finished, scored and valued. 0 without a critic."""
    num_finished_trained: int = 0
    paused: Pause | None = None
    """None while groups are admitted."""
