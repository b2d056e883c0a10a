"""An operator's side of the ledger: what the next update waits for, putting work back, and pauses.

``headrace why``, ``ledger requeue``, ``ledger dead-letters`` and ``run pause`` use it; ``memory.admin``
and ``redis.admin`` implement it under one contract suite. No worker uses it, so no call carries an
incarnation.

Putting work back keeps the books true. An opened trajectory continues from its last chunk. Its
former holder's next write is refused (``WriteStatus.FENCED``), so nothing counts twice. A chunk
made due is scored again by the next scorer, and a field is written once. A dead letter's unit stays
dropped: its tokens are gone, and would be too old. Its *prompt* is admitted again, ahead of fresh
prompts, once there is credit. It becomes a new group with a new number, which no late write to the
old group can touch.

A pause stops the admission of new groups, retried prompts included, and nothing else. Members of
admitted groups are leased, sampled, scored and trained, evaluations too. The pause is stored with
the ledger. So it outlives supervisor, server and learner, until the operator ends it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from pipeline.ledger.types import LatePolicy, Pause, Unit
from protocol.ids import TrajectoryId
from protocol.trajectory import Field


class Place(StrEnum):
    """The state of a trajectory that is not complete."""

    OPEN = "open"
    """Without a holder: it waits for a generator to lease it."""
    PARKED = "parked"
    """Without a holder: its next window waits for credit (unit chunk)."""
    LEASED = "leased"
    FINISHED = "finished"
    """Sampled (unit chunk: written); it waits for its scorers."""


@dataclass(frozen=True, slots=True)
class Lack:
    """Chunks of one trajectory that lack one field."""

    field: Field
    num_chunks: int
    chunk: str
    """The first of these chunks."""
    age_s: float
    """Since it was written; of guidance, since its reward was."""
    overdue_s: float
    """Since its deadline; negative before."""
    num_failures: int
    """A scorer's failures on it."""


@dataclass(frozen=True, slots=True)
class WaitedTrajectory:
    """A trajectory that its unit waits for."""

    name: str
    place: Place
    holder: str
    """The incarnation that holds it, as ``generator-2#1``; empty without one."""
    num_chunks: int
    num_tokens: int
    since_s: float
    """Since it was opened, leased or last written."""
    lacks: tuple[Lack, ...]


@dataclass(frozen=True, slots=True)
class WaitedUnit:
    """A unit that has credit and is not ready."""

    name: str
    oldest_version: int | None
    """The oldest version of its tokens; None before it has begun."""
    num_complete: int
    """Trajectories that lack nothing. A chunk has one."""
    trajectories: tuple[WaitedTrajectory, ...]
    """The incomplete ones."""


@dataclass(frozen=True, slots=True)
class Holder:
    """An incarnation that holds trajectories."""

    who: str
    num_trajectories: int
    num_evaluation: int
    """Of them, in the evaluation lane."""
    lease_left_s: float
    """Until others may take them; negative when the next lease call will."""


@dataclass(frozen=True, slots=True)
class Waits:
    """The work that the next update waits for, at one moment."""

    unit: Unit
    group_size: int
    eta: int
    late: LatePolicy
    policy_version: int
    num_needed: int
    """Units of one update."""
    num_ready: int
    num_running: int
    """Units with credit that are not ready."""
    num_parked: int
    """Trajectories whose next window waits for credit."""
    num_claimed: int
    """Claimed units that are not settled."""
    units: tuple[WaitedUnit, ...]
    """The most urgent running ones: in order of admission; with enough ready ones, by age, since
    the update then waits for the late ones."""
    holders: tuple[Holder, ...]
    num_evaluation_open: int
    num_evaluation_unscored: int
    value_training: bool = False


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """A trajectory's newest chunk in the ledger."""

    chunk: str
    num_tokens: int
    """Response tokens so far."""
    age_s: float
    """Since it was written."""
    is_final: bool
    """The response ends with it."""
    fields: tuple[Field, ...]
    """Scores that it has."""


@dataclass(frozen=True, slots=True)
class Requeued:
    """Counts of the work put back."""

    num_opened: int = 0
    """Trajectories that others may lease at once."""
    num_due: int = 0
    """Chunks that scorers receive at their next look, seconds later at most."""
    unknown: tuple[str, ...] = ()
    """Names that the ledger does not know. If there are any, nothing was changed."""


@dataclass(frozen=True, slots=True)
class Retried:
    """The result of retrying dead letters."""

    prompts: tuple[int, ...] = ()
    """Places in the prompt stream that will be admitted again."""
    num_letters: int = 0
    """Letters taken off the list: all of the groups in question."""
    unknown: tuple[str, ...] = ()
    """Names without a dead letter, or evaluation responses: the next evaluation samples their
    prompts anyway. If there are any, nothing was changed."""
    is_closed: bool = False
    """Admission is closed: the run has all its updates. Nothing was changed."""


@dataclass(frozen=True, slots=True)
class RequeueRequest:
    """The work to put back. One of the three is set."""

    worker: str = ""
    """All that this worker's incarnations hold."""
    trajectories: tuple[TrajectoryId, ...] = field(default=())
    """Open these where they are leased, and make their unscored chunks due."""
    field: Field | None = None
    """Make every chunk that lacks it due."""


class LedgerAdmin(Protocol):
    """An operator's side of the ledger. Every method is one atomic transition; to make a field's
    chunks due is one for each part of them. Each raises LedgerUnavailable."""

    async def waits(self, *, max_units: int = 64) -> Waits:
        """Return what the next update waits for, with details of up to ``max_units`` units."""
        ...

    async def stored(self, *, max_trajectories: int = 20) -> tuple[StoredChunk, ...]:
        """Return the newest chunks of ``max_trajectories`` training responses, newest first."""
        ...

    async def requeue(self, wish: RequeueRequest) -> Requeued:
        """Put work back: leases to open, unscored chunks to due. The learner's claims stay."""
        ...

    async def retry(self, chunks: tuple[str, ...] | None) -> Retried:
        """Admit the prompts of dead letters (None: all) again, and take the letters off."""
        ...

    async def pause(self, *, by: str, reason: str = "") -> Pause:
        """Admit no new group from now on. Return the pause; the earlier one, unchanged, if
        admission was paused already."""
        ...

    async def resume(self) -> Pause | None:
        """Admit groups again. Return the pause that ended; None without one."""
        ...
