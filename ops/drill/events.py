"""Events of a run, as far as a check needs them: one small record each, in the order in which they
took effect."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Ending(StrEnum):
    """How the drill ends a supervisor, or a run."""

    KILL = "SIGKILL of the supervisor"
    HANGUP = "SIGHUP of the supervisor"
    DOWN = "headrace down"
    DOWN_STARTING = "headrace down, while the supervisor starts"


# -- from the ledger's own file --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Admitted:
    """A group entered the ledger."""

    group: int


@dataclass(frozen=True, slots=True)
class Stored:
    """A chunk was written."""

    chunk: str
    trajectory: str
    who: str
    """Incarnation that the chunk names as its writer."""
    begin: int
    end: int
    """Response positions: the first token's, and that after the last."""
    oldest: int
    newest: int
    """Policy versions of its tokens."""
    is_final: bool
    is_true: bool | None
    """Whether its tokens are those that the trajectory's stream holds there; None when that is
    unknown."""
    verdict: float | None = None
    """Of a final one: the verifier's true verdict on the response; None when that is unknown."""


@dataclass(frozen=True, slots=True)
class Judged:
    """A final chunk got its reward."""

    chunk: str
    accuracy: float


@dataclass(frozen=True, slots=True)
class NotScored:
    """A scorer's try at a chunk failed."""

    chunk: str
    field: str


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A chunk is not tried again."""

    chunk: str
    field: str


@dataclass(frozen=True, slots=True)
class Held:
    """A trajectory was leased."""

    trajectory: str
    who: str


@dataclass(frozen=True, slots=True)
class Ended:
    """A trajectory or a chunk left the ledger."""

    name: str
    fate: str
    """``trained``, or ``dropped:<reason>``."""


@dataclass(frozen=True, slots=True)
class Claimed:
    """The learner was given a batch."""

    claim: str
    version: int
    """The learner's."""
    units: tuple[str, ...]
    staleness: int
    """Updates between the learner's weights and those that sampled its oldest token."""


@dataclass(frozen=True, slots=True)
class Settled:
    """A claim was counted as trained."""

    claim: str


@dataclass(frozen=True, slots=True)
class Epoch:
    """A worker's newest epoch changed: earlier incarnations are fenced from here on."""

    worker: str
    epoch: int | None
    """None for a value that is not a number: until the next one the worker owns nothing."""


@dataclass(frozen=True, slots=True)
class Beat:
    """A heartbeat was written."""

    who: str
    pid: int
    num_live: int
    rss_bytes: int


@dataclass(frozen=True, slots=True)
class Published:
    """A policy version was announced."""

    version: int


@dataclass(frozen=True, slots=True)
class Tally:
    """The ledger's counters after a transition that changed them."""

    used: int
    limit: int
    """Credit."""
    groups_missing: int
    """Groups admitted, less trained, dropped and present ones."""


@dataclass(frozen=True, slots=True)
class Status:
    """The run's state was set."""

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
    """Claims whose effect it holds since the checkpoint before."""


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
    """The learner reported an update."""

    update: int
    version: int
    staleness: int
    """Of its oldest token."""


@dataclass(frozen=True, slots=True)
class Audited:
    """The ledger counted both sides of the conservation law."""

    balances: bool
    in_flight: int
    """Trajectories."""
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
    """These processes work in the ledger's folder, from now on."""

    pids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ServerLogged:
    """A server process wrote into its log; several lines in a row are one event."""

    pid: int


@dataclass(frozen=True, slots=True)
class Faulted:
    """A fault of the drill's was on one worker, by the drill's own monotonic clock."""

    worker: str
    begin_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Lost:
    """The supervisor took a worker for dead, gave it up, evicted it, or found that it had ended, by the
    drill's own monotonic clock."""

    worker: str
    how: str
    """The event's name in the supervisor's log."""
    reason: str
    at_s: float


@dataclass(frozen=True, slots=True)
class Repaired:
    """The run's record of repairs has a repair of a worker, or a step of one that acts on it."""

    worker: str
    cause: str


@dataclass(frozen=True, slots=True)
class HealthySpan:
    """While this time lasted, by the wall clock, nothing was wrong with any worker."""

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
    """The drill gave the run an order, which holds or was overruled."""

    what: str
    held: bool
    found: str


@dataclass(frozen=True, slots=True)
class UnreportedJunk:
    """``headrace status`` did not name an entry of the registry that cannot be read."""

    entry: str


@dataclass(frozen=True, slots=True)
class EndOrdered:
    """The drill requested the run's end, or killed its supervisor."""

    how: Ending
    version: int = -1
    """The newest in the learner's history when the run had received the request."""


@dataclass(frozen=True, slots=True)
class SupervisorEnded:
    """A supervisor's process is over, before the run's end."""

    exit_code: int
    """Negative: the number of the signal that killed it."""


@dataclass(frozen=True, slots=True)
class Left:
    """Something was there still when the run had ended."""

    what: str
    after: str


@dataclass(frozen=True, slots=True)
class Finished:
    """The run is over."""

    exit_code: int


Event = (
    Admitted | Stored | Judged | NotScored | DeadLetter | Held | Ended | Claimed | Settled | Epoch | Beat | Published | Tally
    | Status | Checkpointed | Sampled | Killed | Updated | Audited | Crashed | Stalled | Serving | ServerLogged | Faulted | Lost
    | Repaired | HealthySpan | Blamed | OrderResult | UnreportedJunk | EndOrdered | SupervisorEnded | Left | Finished
)  # fmt: skip
