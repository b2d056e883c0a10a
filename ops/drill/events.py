"""The events of a run that a check needs, one small record each, in the order in which they took effect; and the
limits that it checks against."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

Found = Iterator[str]
"""Violations of one invariant, in words."""


@dataclass(frozen=True, slots=True)
class Limits:
    eta: int
    group_size: int
    num_slots: int
    window_tokens: int
    num_updates: int = 0
    max_attempts: int = 1
    """A scorer's failed attempts before a chunk becomes a dead letter."""
    max_rss_bytes: int = 1 << 30


class Ending(StrEnum):
    """How the drill ends a supervisor, or a run."""

    KILL = "SIGKILL of the supervisor"
    HANGUP = "SIGHUP of the supervisor"
    DOWN = "headrace down"
    DOWN_STARTING = "headrace down, while the supervisor starts"


# -- from the ledger's own file --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Admitted:
    group: int


@dataclass(frozen=True, slots=True)
class Stored:
    chunk: str
    trajectory: str
    who: str
    """The incarnation that the chunk names as its writer."""
    begin: int
    end: int
    """Response positions of the first token, and after the last."""
    oldest: int
    newest: int
    """Policy versions of its tokens."""
    is_final: bool
    is_true: bool | None
    """Whether its tokens are those of the trajectory's stream; None if unknown."""
    verdict: float | None = None
    """The verifier's true verdict on a finished response; None if unknown."""


@dataclass(frozen=True, slots=True)
class NotStored:
    """The ledger refused a window, by its generator's log: another generator has the trajectory."""

    who: str
    trajectory: str
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Judged:
    """A final chunk got its reward."""

    chunk: str
    accuracy: float


@dataclass(frozen=True, slots=True)
class Answered:
    """The environment answered a chunk."""

    chunk: str
    trajectory: str
    num_tokens: int | None
    """Of its answer; None if the next chunk begins a sequence, or the trajectory."""
    accuracy: float | None
    """Of the trajectory that ends here; None if it goes on."""
    fault: str
    """What differs from the answer that the environment gives to these tokens; "" if nothing does."""


@dataclass(frozen=True, slots=True)
class NotScored:
    chunk: str
    field: str


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A chunk will not be tried again."""

    chunk: str
    field: str


@dataclass(frozen=True, slots=True)
class Held:
    trajectory: str
    who: str


@dataclass(frozen=True, slots=True)
class Ended:
    name: str
    fate: str
    """``trained``, or ``dropped:<reason>``."""


@dataclass(frozen=True, slots=True)
class Claimed:
    """The learner received a batch."""

    claim: str
    version: int
    """The learner's version."""
    units: tuple[str, ...]
    staleness: int
    """Updates between the learner's weights and those that sampled the batch's oldest token."""


@dataclass(frozen=True, slots=True)
class Settled:
    """A claim counts as trained."""

    claim: str


@dataclass(frozen=True, slots=True)
class Epoch:
    """A worker's newest epoch changed, which fences earlier incarnations."""

    worker: str
    epoch: int | None
    """None if the value is not a number: until the next one the worker owns nothing."""


@dataclass(frozen=True, slots=True)
class Beat:
    who: str
    pid: int
    num_live: int
    rss_bytes: int


@dataclass(frozen=True, slots=True)
class Published:
    version: int


@dataclass(frozen=True, slots=True)
class Tally:
    """The ledger's counters after a transition that changed them."""

    used: int
    limit: int
    """Limit of the used credit."""
    groups_missing: int
    """Groups admitted, less those trained, dropped and present."""


@dataclass(frozen=True, slots=True)
class Status:
    state: str
    detail: str


# -- from elsewhere --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Checkpointed:
    """A checkpoint was found, in the order of writing."""

    name: str
    version: int
    num_updates: int
    claims: tuple[str, ...]
    """Claims whose effect it adds to the checkpoint before."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """An emulated generator sampled a stretch of a response."""

    pid: int
    trajectory: str
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Killed:
    """The drill killed a worker's process."""

    worker: str
    pid: int


@dataclass(frozen=True, slots=True)
class Updated:
    update: int
    version: int
    staleness: int
    """Of its oldest token."""


@dataclass(frozen=True, slots=True)
class Audited:
    """The ledger compared both sides of the conservation law."""

    balances: bool
    in_flight: int
    """Number of trajectories."""
    text: str


@dataclass(frozen=True, slots=True)
class Crashed:
    """A worker ended by an unexpected error."""

    worker: str
    error: str


@dataclass(frozen=True, slots=True)
class Stalled:
    """Nothing moved for too long."""

    text: str


@dataclass(frozen=True, slots=True)
class Serving:
    """From now on these processes work in the ledger's folder."""

    pids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ServerLogged:
    """A server process wrote into its log; several lines in a row are one event."""

    pid: int


@dataclass(frozen=True, slots=True)
class Faulted:
    """The drill had a fault on one worker, by the drill's monotonic clock."""

    worker: str
    begin_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Lost:
    """The supervisor declared a worker dead, gave it up, evicted it, or found that it had ended, by the drill's
    monotonic clock."""

    worker: str
    how: str
    """The event's name in the supervisor's log."""
    reason: str
    at_s: float


@dataclass(frozen=True, slots=True)
class Repaired:
    """The run's record has a repair of a worker, or a step of a repair that acts on it."""

    worker: str
    cause: str


@dataclass(frozen=True, slots=True)
class HealthySpan:
    """A time, by the wall clock, in which nothing was wrong with any worker."""

    begin_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Blamed:
    """An incident about a component was opened or grew, by the wall clock."""

    component: str
    sentence: str
    at_s: float


@dataclass(frozen=True, slots=True)
class OrderResult:
    """An order that the drill gave the run was carried out, or was overruled."""

    what: str
    held: bool
    found: str


@dataclass(frozen=True, slots=True)
class UnreportedJunk:
    """``headrace status`` did not name an unreadable entry of the registry."""

    entry: str


@dataclass(frozen=True, slots=True)
class EndOrdered:
    """The drill requested the run's end, or killed its supervisor."""

    how: Ending
    version: int = -1
    """Newest version in the learner's history when the run had received the request."""


@dataclass(frozen=True, slots=True)
class SupervisorEnded:
    """A supervisor's process ended before the run did."""

    exit_code: int
    """Negative: the number of the signal that killed it."""


@dataclass(frozen=True, slots=True)
class Left:
    """Something remained after the run had ended."""

    what: str
    after: str


@dataclass(frozen=True, slots=True)
class Finished:
    exit_code: int


Event = (
    Admitted | Stored | Answered | Judged | NotScored | NotStored | DeadLetter | Held | Ended | Claimed | Settled | Epoch | Beat
    | Published | Tally | Status | Checkpointed | Sampled | Killed | Updated | Audited | Crashed | Stalled | Serving
    | ServerLogged | Faulted | Lost | Repaired | HealthySpan | Blamed | OrderResult | UnreportedJunk | EndOrdered
    | SupervisorEnded | Left | Finished
)  # fmt: skip
