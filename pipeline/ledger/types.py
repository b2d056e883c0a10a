"""The nouns of the ledger's contract (``pipeline.ledger.contract``)."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from protocol.ids import ChunkId, TrajectoryId
from protocol.trajectory import Field, RewardScore, Score, TrajectoryChunk, ValueScore


class Unit(StrEnum):
    """The learner claims these at once."""

    GROUP = "group"
    TRAJECTORY = "trajectory"
    CHUNK = "chunk"


class DropReason(StrEnum):
    """Why admitted work is not trained on. Every drop has exactly one."""

    STALE = "stale"
    """Its oldest token is more than eta versions behind the learner."""
    NO_SIGNAL = "no_signal"
    """Every member of the group has the same raw accuracy, so every advantage would be zero. Or all
    responses of the unit are masked, or the learner found no token to train on in a whole claim."""
    DEAD_LETTER = "dead_letter"
    """A scorer failed on it ``max_attempts`` times; stored with its traceback for a person. A group
    is dropped when fewer than two of its members have a verdict or may get one."""
    NON_FINITE = "non_finite"
    """The learner found NaN or infinity in its arrays, or in a step on it, twice. Or the step was a
    spike, twice."""
    CANCELLED = "cancelled"
    """The run was ended with this work unfinished, on request."""
    VALUE_WARMUP = "value_warmup"
    """Claimed before the critic was good enough for the policy to start."""
    ROLLED_BACK = "rolled_back"
    """Trained and settled, then given up: the learner restarted from an earlier checkpoint."""


class LatePolicy(StrEnum):
    """The learner's rule for running work that would be too stale at the next update."""

    WAIT = "wait"
    """Wait for it: staleness is bounded by construction, and short responses gain nothing."""
    DROP = "drop"
    """Continue, and drop it once ready: faster with heavy tails, biased against long responses."""


class Refusal(StrEnum):
    """Why a lease call returned less than requested."""

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
    """Admission was closed: the run has all its updates, or is stopping."""
    PAUSED = "paused"
    """An operator has paused admission: work in flight goes on, and no new group is admitted."""


REFUSAL_WORDS: Final[dict[Refusal, str]] = {
    Refusal.NO_CREDIT: "the learner to settle or drop work: sampling is as far ahead as staleness allows",
    Refusal.EXHAUSTED: "nothing: every prompt is admitted",
    Refusal.BEHIND: "the published weights",
    Refusal.MEMORY: "the ledger to shrink below its watermark",
    Refusal.CLOSED: "nothing: admission is closed",
    Refusal.PAUSED: "an operator, who has paused admission; `headrace run resume` ends that",
}
"""The wait of a generator after each refusal, in its heartbeat."""


@dataclass(frozen=True, slots=True)
class LedgerSpec:
    """The ledger's fixed settings. Reopening with other ones raises LedgerMismatch."""

    run: str
    unit: Unit
    group_size: int
    units_per_update: int
    """B, in credit: trajectories, or chunks (unit chunk). For groups, a multiple of group_size."""
    eta: int
    """Largest allowed version lag."""
    num_prompts: int | None = None
    """Length of the prompt stream (prompts x epochs); None when it is endless."""
    oversampling: float = 1.0
    """At least 1: work in flight over one update's, for filters that drop some of it."""
    fields: frozenset[Field] = frozenset({Field.REWARD})
    """Fields of a ready unit: REWARD and GUIDANCE on final chunks only, the others on every chunk.
    GUIDANCE is due from the moment of its reward, never before."""
    signal_filter: bool = False
    """Groups only: drop a group with one raw accuracy as soon as that is known. With
    ``value_training``, once it is complete, since the critic learns from it too."""
    late: LatePolicy = LatePolicy.WAIT
    data_digest: str = ""
    """Of the prompt stream: files, tokeniser, limits, seed. All generators read the same one."""
    lease_s: float = 30.0
    """A generator that has not renewed for this long loses its trajectories."""
    scoring_deadline_s: float = 30.0
    """A chunk not scored by then is handed out again by ``overdue``."""
    max_attempts: int = 3
    """Failures of one role on one chunk before its unit is a dead letter."""
    max_bytes: int | None = None
    """Watermark: admission stops while the store holds more than this."""
    value_training: bool = False
    """Keep every finished, scored training trajectory with its values until the value worker has
    trained on it. Its unit's end does not matter, except drops as a
    dead letter, non-finite or cancelled. Needs the fields REWARD and VALUE. These bytes count towards ``max_bytes``."""


@dataclass(frozen=True, slots=True)
class Restart:
    """Weights that a learner published at its start (``pipeline.ledger.version_history``)."""

    policy_version: int
    """Their new number, above all earlier ones."""
    num_updates: int
    """Updates in them."""


@dataclass(frozen=True, slots=True)
class EvaluationRequest:
    """An evaluation for the generators, in a separate lane that takes no credit."""

    number: int
    """Grows by one an evaluation; its trajectories are ``e<number>.<prompt>.<sample>``."""
    policy_version: int
    """Generators serve at least this version before they begin."""
    num_prompts: int
    samples_per_prompt: int
    temperature: float
    """0 is greedy."""
    top_p: float = 1.0
    first_prompt: int = 0
    """The prompt that counts as its number 0, among the held-out prompts of all sets."""
    set: str = ""
    """The name of its evaluation set; empty for that of ``data.evaluation``."""
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stop_strings: tuple[str, ...] = ()
    max_response_tokens: int | None = None
    """None: the run's."""


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


MAX_SHOWN, MAX_SHOWN_BYTES = 16, 262_144
"""Responses of each kind that are kept for people to read, and the largest chunk of one."""


@dataclass(frozen=True, slots=True)
class ShownResponse:
    """A response that the learner never claims, kept for people to read."""

    kind: str
    """``evaluation``, or the reason why its group was dropped."""
    chunk: TrajectoryChunk
    """The last one, which has the text."""
    reward: RewardScore


@dataclass(frozen=True, slots=True)
class EvaluationState:
    """An evaluation's progress."""

    request: EvaluationRequest
    samples: tuple[EvaluationSample, ...]
    num_failed: int = 0
    """Dead letters: reported, never counted as wrong."""

    @property
    def is_complete(self) -> bool:
        """Whether every response is scored or a dead letter."""
        return len(self.samples) + self.num_failed >= self.request.num_prompts * self.request.samples_per_prompt


@dataclass(frozen=True, slots=True)
class Lease:
    """The right, for one incarnation, to extend one trajectory."""

    trajectory: TrajectoryId
    next_index: int
    """Index of the chunk to write next."""
    prompt: int
    """The prompt's place in its stream, or in the evaluation set. It may differ from the group's
    number: a dead letter's prompt may be admitted again."""
    last_chunk: TrajectoryChunk | None
    """The newest chunk, to continue from; None when the trajectory has not begun."""
    evaluation: EvaluationRequest | None = None
    """Set in the evaluation lane."""


@dataclass(frozen=True, slots=True)
class LeaseGrant:
    """The result of ``lease``: the leases, and why there are no more."""

    leases: tuple[Lease, ...]
    refusal: Refusal | None = None


class WriteStatus(StrEnum):
    """The result of a write."""

    STORED = "stored"
    DUPLICATE = "duplicate"
    """It was written before; nothing changed."""
    FENCED = "fenced"
    """The writer no longer holds this trajectory; nothing changed."""
    UNKNOWN = "unknown"
    """The chunk was settled, dropped, or never written; nothing changed."""


@dataclass(frozen=True, slots=True)
class ChunkWrite:
    """The result of ``write_chunk``."""

    status: WriteStatus
    keeps_lease: bool
    """Whether the writer may extend the trajectory at once. False after a final chunk and after
    fencing. Also False (unit chunk) without credit for the next window, or if the writer is behind
    the published version. The trajectory is then parked, and leased again before new prompts."""


@dataclass(frozen=True, slots=True)
class ScoredChunk:
    """A chunk with all its scores."""

    chunk: TrajectoryChunk
    scores: dict[Field, Score]


@dataclass(frozen=True, slots=True)
class ClaimedUnit:
    """One complete unit of a claim: every member of a group, every chunk of a trajectory."""

    name: str
    """Group number, trajectory id or chunk id, as text."""
    trajectories: tuple[tuple[ScoredChunk, ...], ...]
    """By member, then by chunk index. One chunk when the unit is the chunk. A member of a group
    whose final chunk has no reward never got a verdict."""


@dataclass(frozen=True, slots=True)
class FinishedTrajectory:
    """A value worker's training item: a whole response, its score, and its values by window."""

    chunk: TrajectoryChunk
    """The final chunk: its context and tokens are the whole response."""
    reward: RewardScore
    values: tuple[ValueScore, ...]
    """By chunk; together one value for each response token."""


@dataclass(frozen=True, slots=True)
class FinishedClaim:
    """A value batch, leased to the value worker's incarnation until settled or returned."""

    claim_id: str
    trajectories: tuple[FinishedTrajectory, ...]


@dataclass(frozen=True, slots=True)
class Claim:
    """A batch, leased to the learner's incarnation until settled or returned."""

    claim_id: str
    policy_version: int
    """The learner's version at the claim."""
    units: tuple[str, ...]


class ClaimWait(StrEnum):
    """Why ``claim`` returned no claim."""

    NOT_ENOUGH = "not_enough"
    """Too few fresh ready units for an update; more are on the way."""
    LATE_WORK = "late_work"
    """Enough are ready, but running work would become stale, and the policy waits."""
    STARVED = "starved"
    """The prompt stream is exhausted and all work in flight is ready: no update can fill again."""


@dataclass(frozen=True, slots=True)
class ClaimRefused:
    """The learner's wait, and its progress."""

    wait: ClaimWait
    num_ready: int
    num_needed: int
    oldest_running: str | None = None
    """The first unit by admission among those not ready."""


@dataclass(frozen=True, slots=True)
class Balance:
    """One line of the conservation law, in one currency (groups, trajectories or tokens)."""

    admitted: int
    trained: int
    dropped: dict[str, int] = field(default_factory=dict[str, int])
    in_flight: dict[str, int] = field(default_factory=dict[str, int])
    """Counted by walking the stored data: open, leased, finished, ready, claimed."""

    @property
    def difference(self) -> int:
        """Admitted minus all the rest; 0 unless there is a bug."""
        return self.admitted - self.trained - sum(self.dropped.values()) - sum(self.in_flight.values())


@dataclass(frozen=True, slots=True)
class Audit:
    """Both sides of the conservation law at one moment."""

    groups: Balance
    trajectories: Balance
    tokens: Balance
    finished: Balance = field(default_factory=lambda: Balance(0, 0))
    """Of the value worker's trajectories. Admitted: finished, scored and valued. Trained: settled.
    In flight: waiting or claimed."""
    tokens_stored: dict[str, int] = field(default_factory=dict[str, int])
    """Tokens of all chunks ever stored, evaluation included, by the incarnation that wrote them."""
    num_unflushed: int = 0
    """Last checkpoints in a row for which the server did not confirm its file on disk."""

    @property
    def balances(self) -> bool:
        """Whether all differences are zero."""
        return not any(balance.difference for balance in (self.groups, self.trajectories, self.tokens, self.finished))


@dataclass(frozen=True, slots=True)
class QueueStat:
    """One ledger queue, for ``headrace ledger queues``."""

    name: str
    depth: int
    limit: int | None
    oldest_age_s: float | None
    waiting_for: str
    """The role that empties it: ``generator``, ``reward``, ``learner`` ..."""


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """Work that a role failed on as often as allowed, or that the learner could not train on."""

    chunk: str
    role: str
    """The field that lacks, or ``learner``."""
    worker: str
    error: str
    """The last traceback."""
    num_attempts: int
    at_s: float
    prompt: int
    """Its prompt's place in the stream, to admit it again."""


@dataclass(frozen=True, slots=True)
class UnitLetter:
    """A dead letter of a unit that the learner cannot train on."""

    chunk: ChunkId
    """One of the unit's, by which it is named."""
    error: str


@dataclass(frozen=True, slots=True)
class Pause:
    """An operator's pause of admission. It lasts until the operator ends it."""

    since_s: float
    """When it began, by the ledger's clock, in seconds since 1970."""
    by: str
    """The operator, as ``user@host``."""
    reason: str = ""
    """Why, in the operator's words; or empty."""


@dataclass(frozen=True, slots=True)
class Totals:
    """Counters of staleness and progress, in credit unless named otherwise."""

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
    """Every prompt is admitted, and none waits for a retry."""
    num_unflushed: int = 0
    """Last checkpoints in a row for which the server did not confirm its file on disk."""
    next_group: int = 0
    """Above the numbers of all admitted groups."""
    num_trajectories_admitted: int = 0
    credit_trained: int = 0
    """Of ``credit_used``, that is trained."""
    num_finished_admitted: int = 0
    """Trajectories for the value worker: finished, scored and valued. 0 without a critic."""
    num_finished_trained: int = 0
    paused: Pause | None = None
    """The pause of admission; None while groups are admitted."""
