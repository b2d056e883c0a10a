"""The ledger as a person sees it: what the next update waits for, and putting work back.

*Consumes* questions and wishes (``headrace why``, ``requeue``, ``dead-letters``). *Produces* views
of one moment, and work that is open, due or admitted again. *Waits for* nothing. Two
implementations, ``pipeline.ledger.memory.admin`` and ``pipeline.ledger.redis.admin``; one contract
suite. No worker uses it, so no call carries an incarnation.

What putting back keeps. A trajectory that is opened goes on from its last chunk; whoever held it is
told so by its next write (``WriteStatus.FENCED``) and nothing of it counts twice. A chunk that is
made due is scored again by whoever asks next, and a field is written once. A dead letter's unit was
dropped, and stays dropped in the books: its tokens are gone, and would be too old. What is admitted
again is its *prompt*, as a new group with a new number, ahead of fresh prompts, once there is
credit; so no late write that belonged to the old group can touch the new one, and the conservation
law holds at every step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from pipeline.ledger.contract import LatePolicy, Unit
from protocol.ids import TrajectoryId
from protocol.trajectory import Field


class Place(StrEnum):
    """Where a trajectory that is not complete is."""

    OPEN = "open"
    """Nobody holds it: it waits for a generator to lease it."""
    LEASED = "leased"
    FINISHED = "finished"
    """Sampled (for a chunk: written); it waits for its scorers."""


@dataclass(frozen=True, slots=True)
class Lack:
    """Chunks of one trajectory that lack one field."""

    field: Field
    num_chunks: int
    chunk: str
    """The first of them."""
    age_s: float
    """Since it was written."""
    overdue_s: float
    """Since its deadline; negative before."""
    num_failures: int
    """How often a scorer has failed on it."""


@dataclass(frozen=True, slots=True)
class WaitedTrajectory:
    """A trajectory that its unit waits for."""

    name: str
    place: Place
    holder: str
    """The incarnation that holds it, as ``generator-2#1``; empty when nobody does."""
    num_chunks: int
    num_tokens: int
    since_s: float
    """Since it was opened, leased or last written to."""
    lacks: tuple[Lack, ...]


@dataclass(frozen=True, slots=True)
class WaitedUnit:
    """A unit that has credit and is not ready."""

    name: str
    oldest_version: int | None
    """The oldest version that it may hold; None before it has begun."""
    num_complete: int
    """Of its trajectories, those that lack nothing. A chunk has one."""
    trajectories: tuple[WaitedTrajectory, ...]
    """The others."""


@dataclass(frozen=True, slots=True)
class Holder:
    """An incarnation that holds trajectories."""

    who: str
    num_trajectories: int
    num_evaluation: int
    """Of them, in the evaluation lane."""
    lease_left_s: float
    """Until others may take them; negative when the next lease call of anybody will."""


@dataclass(frozen=True, slots=True)
class Waits:
    """What the next update waits for, at one moment."""

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
    """Units that are claimed and not settled."""
    units: tuple[WaitedUnit, ...]
    """Of the running ones those that matter first: in order of admission; with enough ready ones,
    by age, since then the late ones are waited for."""
    holders: tuple[Holder, ...]
    num_evaluation_open: int
    num_evaluation_unscored: int
    value_training: bool = False


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """The newest chunk of a trajectory that is in the ledger."""

    chunk: str
    num_tokens: int
    """Of the response so far."""
    age_s: float
    """Since it was written."""
    is_final: bool
    """The response ends with it."""
    fields: tuple[Field, ...]
    """Scores that it has."""


@dataclass(frozen=True, slots=True)
class Requeued:
    """What was put back."""

    num_opened: int = 0
    """Trajectories that others may lease at once."""
    num_due: int = 0
    """Chunks that will be handed out again at the next look of a scorer, seconds later at most."""
    unknown: tuple[str, ...] = ()
    """Names that the ledger does not know. If there is one, nothing was changed."""


@dataclass(frozen=True, slots=True)
class Retried:
    """What became of a wish to retry dead letters."""

    prompts: tuple[int, ...] = ()
    """Places in the stream of prompts that will be admitted again."""
    num_letters: int = 0
    """Letters that this answers: all of the groups in question."""
    unknown: tuple[str, ...] = ()
    """Names that no dead letter has, or evaluation responses, whose prompts the next evaluation
    samples anyway. If there is one, nothing was changed."""
    is_closed: bool = False
    """Admission is closed: the run has all the updates that it wants. Nothing was changed."""


@dataclass(frozen=True, slots=True)
class Wish:
    """What to put back. One of the three."""

    worker: str = ""
    """All that its incarnations hold."""
    trajectories: tuple[TrajectoryId, ...] = field(default=())
    """Open these where they are leased, and make due what they lack."""
    field: Field | None = None
    """Make due every chunk that lacks it."""


class LedgerAdmin(Protocol):
    """A person's side of the ledger. Every method is one atomic transition and raises
    LedgerUnavailable.
    """

    async def waits(self, *, max_units: int = 64) -> Waits:
        """Return what the next update waits for, with details of up to ``max_units`` units."""
        ...

    async def stored(self, *, max_trajectories: int = 20) -> tuple[StoredChunk, ...]:
        """Return the newest chunks of up to ``max_trajectories`` training responses, of the newest
        groups first.
        """
        ...

    async def requeue(self, wish: Wish) -> Requeued:
        """Put work back: leases to open, unscored chunks to due. Claims are the learner's and are
        left alone.
        """
        ...

    async def retry(self, chunks: tuple[str, ...] | None) -> Retried:
        """Admit the prompts of these dead letters (of all when None) again, each once, and take the
        letters off the list.
        """
        ...
