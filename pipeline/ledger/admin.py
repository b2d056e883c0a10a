"""The ledger for operators: what the next update waits for, requeueing work, and pauses.

Used by ``headrace why``, ``ledger requeue``, ``ledger dead-letters`` and ``run pause``; implemented by
``memory.admin`` and ``redis.admin`` under one contract suite. Workers don't use it, so no call takes an
incarnation.

Requeueing keeps the accounts right. A reopened trajectory continues from its last chunk, and its former
holder's next write is refused (``WriteStatus.FENCED``), so nothing counts twice. A chunk made due is scored
again by the next scorer, but each field is still written only once. A dead letter's unit stays dropped: its
tokens are gone and would be too old. Its *prompt* is admitted again, ahead of fresh prompts, as a new group
with a new number, which no late write to the old group can touch.

A pause only stops the admission of new groups, retried prompts included. Admitted groups are still leased,
sampled, scored and trained, and evaluations go on. The pause is stored in the ledger, so it survives restarts
of supervisor, server and learner until the operator ends it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from pipeline.ledger.types import LatePolicy, Pause, Unit
from protocol.ids import TrajectoryId
from protocol.trajectory import Field


class Place(StrEnum):
    """The state of an incomplete trajectory."""

    OPEN = "open"
    """Waits for a generator to lease it."""
    PARKED = "parked"
    """Its next window waits for credit (unit chunk)."""
    LEASED = "leased"
    WAITING = "waiting"
    """Waits for its environment."""
    FINISHED = "finished"
    """Sampled (unit chunk: written); waits for its scorers."""


@dataclass(frozen=True, slots=True)
class Lack:
    """A field that some chunks of a trajectory still lack."""

    field: Field
    num_chunks: int
    chunk: str
    """The first of these chunks."""
    age_s: float
    """Seconds since the chunk was written; for guidance, since its reward; for the reward after a turn, since
    that turn."""
    overdue_s: float
    """Seconds since the deadline; negative before it."""
    num_failures: int
    """How often a scorer failed on it."""


@dataclass(frozen=True, slots=True)
class WaitedTrajectory:
    """An incomplete trajectory that holds up its unit."""

    name: str
    place: Place
    holder: str
    """The incarnation that holds it, such as ``generator-2#1``; empty if nobody does."""
    num_chunks: int
    num_tokens: int
    since_s: float
    """Seconds since it was opened, leased or last written."""
    lacks: tuple[Lack, ...]


@dataclass(frozen=True, slots=True)
class WaitedUnit:
    """A unit that has credit but is not ready."""

    name: str
    oldest_version: int | None
    """The oldest version that sampled its tokens; None without tokens."""
    num_complete: int
    """Trajectories that lack nothing. A chunk counts as one trajectory."""
    trajectories: tuple[WaitedTrajectory, ...]
    """The incomplete ones."""


@dataclass(frozen=True, slots=True)
class Holder:
    who: str
    num_trajectories: int
    num_evaluation: int
    """How many of these are in the evaluation lane."""
    lease_left_s: float
    """Seconds until others may take them; negative when the next lease call will."""


@dataclass(frozen=True, slots=True)
class Waits:
    unit: Unit
    group_size: int
    eta: int
    late: LatePolicy
    policy_version: int
    num_needed: int
    """Units per update."""
    num_ready: int
    num_running: int
    """Units with credit that are not ready."""
    num_parked: int
    """Trajectories whose next window waits for credit."""
    num_claimed: int
    """Claimed units that are not settled yet."""
    units: tuple[WaitedUnit, ...]
    """The most urgent running units: in order of admission or, when enough units are ready, by age, since the
    update then waits for the late ones."""
    holders: tuple[Holder, ...]
    num_evaluation_open: int
    num_evaluation_unscored: int
    num_evaluation_waiting: int = 0
    """Evaluation responses that wait for their environment."""
    value_training: bool = False


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """The newest stored chunk of a trajectory."""

    chunk: str
    num_tokens: int
    age_s: float
    is_final: bool
    """Whether the response ends with it."""
    fields: tuple[Field, ...]
    """Fields that have a score."""


@dataclass(frozen=True, slots=True)
class Requeued:
    num_opened: int = 0
    """Trajectories that are open for lease again."""
    num_due: int = 0
    """Chunks that scorers will receive at their next poll, within seconds."""
    unknown: tuple[str, ...] = ()
    """Names that the ledger does not know. If there are any, nothing was changed."""


@dataclass(frozen=True, slots=True)
class Retried:
    prompts: tuple[int, ...] = ()
    """Places in the prompt stream that will be admitted again."""
    num_letters: int = 0
    """Dead letters taken off the list: all those of the groups concerned."""
    unknown: tuple[str, ...] = ()
    """Names without a dead letter, or of evaluation responses, whose prompts the next evaluation samples
    anyway. If there are any, nothing was changed."""
    is_closed: bool = False
    """Admission is closed because the run has all its updates; nothing was changed."""


@dataclass(frozen=True, slots=True)
class RequeueRequest:
    """The work to requeue. Exactly one of the three fields is set."""

    worker: str = ""
    """Everything that this worker's incarnations hold."""
    trajectories: tuple[TrajectoryId, ...] = field(default=())
    """Reopen these where they are leased, and make their unscored chunks due."""
    field: Field | None = None
    """Make every chunk that lacks this field due."""


class LedgerAdmin(Protocol):
    """Ledger operations for operators. Each method is one atomic transition, except that making all chunks of
    a field due takes one transition per batch. Each raises LedgerUnavailable."""

    async def waits(self, *, max_units: int = 64) -> Waits:
        """Return what the next update waits for, with details of up to ``max_units`` units."""
        ...

    async def stored(self, *, max_trajectories: int = 20) -> tuple[StoredChunk, ...]:
        """Return the newest chunks of ``max_trajectories`` training responses, newest first."""
        ...

    async def requeue(self, request: RequeueRequest) -> Requeued:
        """Reopen leased trajectories and make unscored chunks due. The learner's claims are not touched."""
        ...

    async def retry(self, chunks: tuple[str, ...] | None) -> Retried:
        """Admit the prompts of these dead letters (None: all) again, and remove the letters."""
        ...

    async def pause(self, *, by: str, reason: str = "") -> Pause:
        """Stop admitting new groups. Returns the pause; an existing pause is kept and returned unchanged."""
        ...

    async def resume(self) -> Pause | None:
        """Admit groups again. Returns the pause that ended; None if there was none."""
        ...
