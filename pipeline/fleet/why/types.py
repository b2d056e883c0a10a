"""The types of an explanation: the snapshot, and chains with causes and outlooks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from pipeline.fleet.health import HealthKind
from pipeline.fleet.status import WorkerRow
from pipeline.runtime.liveness import RESTARTED_WITHIN_S
from protocol.ids import Role

if TYPE_CHECKING:
    from pipeline.fleet.flow.graph import Graph
    from pipeline.fleet.incidents.records import Incident
    from pipeline.ledger.admin import Waits
    from pipeline.ledger.types import QueueStat, Totals
    from pipeline.runtime.registry.contract import RunState

_NO_ROOM = "No space left on device"


class Outlook(StrEnum):
    """What will become of a wait."""

    MOVES = "moves"
    """Ordinary work; nothing is wrong."""
    MENDS = "mends"
    """Something is wrong, and the run repairs it without help."""
    YOU = "you"
    """A person must act."""
    ENDED = "ended"
    """The run is over, or nearly."""

    @property
    def gravity(self) -> int:
        return (Outlook.MOVES, Outlook.ENDED, Outlook.MENDS, Outlook.YOU).index(self)


class Cause(StrEnum):
    """The root cause of a chain."""

    WORKING = "working"
    ABSENT = "absent"
    """A wanted worker has no process, or no heartbeat yet."""
    SILENT = "silent"
    STUCK = "stuck"
    STARTING = "starting"
    DRAINING = "draining"
    LEASE = "lease"
    """A dead incarnation holds the work; the next generator to ask for a lease takes it."""
    REDELIVERY = "redelivery"
    """The scorer is idle, so the message was lost; at its deadline the chunk is handed out again."""
    LEDGER = "ledger"
    """The ledger's server does not answer, or is full."""
    DISK = "disk"
    """No room or no right to write in the folder that the chain names."""
    MEMORY = "memory"
    """The ledger is over its memory watermark, so admission has stopped."""
    CREDIT = "credit"
    WEIGHTS = "weights"
    QUARANTINE = "quarantine"
    """A generator could not make the published weights match their digest."""
    UNREACHABLE = "unreachable"
    """A worker cannot reach a mailbox on another host."""
    ENDPOINT = "endpoint"
    """A judge behind HTTP is down or limits the rate."""
    CHECKPOINT = "checkpoint"
    """The learner waits until a checkpoint is written."""
    NO_SIGNAL = "no_signal"
    """No recent group had anything to learn from."""
    EXHAUSTED = "exhausted"
    CLOSED = "closed"
    PAUSED = "paused"
    """An operator has paused admission."""
    FAILED = "failed"
    """A worker ended in a way that restarts cannot repair, or too often."""
    SUPERVISOR = "supervisor"
    """Workers continue, but dead ones are not restarted."""
    NOBODY = "nobody"
    """The run has no process."""


@dataclass(frozen=True, slots=True)
class CriticNeeds:
    """The conditions of the critic's gate."""

    min_explained_variance: float | None
    pretrain_steps: int
    batch_trajectories: int


@dataclass(frozen=True, slots=True)
class Ended:
    """How a worker's last process ended; ``str()`` gives it in words."""

    how: str
    ago_s: float
    num: int = 1
    """Number of recent exits, including this one."""
    error: str = ""
    is_replaced: bool = False
    """Whether the supervisor killed it because it was frozen or stuck."""

    @property
    def is_without_room(self) -> bool:
        """Whether a full disk just ended it, so that its next process may end the same way."""
        return _NO_ROOM in self.error and self.ago_s < RESTARTED_WITHIN_S

    @property
    def is_worth_a_word(self) -> bool:
        """Whether it matters even though the worker is back."""
        return bool(self.error) or self.num > 1

    def __str__(self) -> str:
        words = self.how + (f" by {self.error}" if self.error else "") + f", {seconds(self.ago_s)} ago"
        return words if self.num == 1 else f"{words}, the {_ordinal(self.num)} time within 10 min"


@dataclass(frozen=True, slots=True)
class Snapshot:
    run: str
    state: RunState
    detail: str
    has_supervisor: bool
    workers: Sequence[WorkerRow] = ()
    wanted: Mapping[str, Role] = field(default_factory=dict[str, Role])
    """Roles of the workers that should exist, by name."""
    waits: Waits | None = None
    """None if the ledger does not answer."""
    totals: Totals | None = None
    queues: Mapping[str, QueueStat] = field(default_factory=dict)
    critic: CriticNeeds | None = None
    """None in a run without a critic."""
    ledger_error: str = ""
    unwritten: str | None = None
    """Folder that the ledger's server cannot write to, or None."""
    exits: Mapping[str, Ended] = field(default_factory=dict[str, "Ended"])
    """The last exit of each worker that had one, by name."""
    replaced_after_s: float = 10.0
    """Seconds of silence before the supervisor replaces a worker."""
    incidents: Sequence[Incident] = ()
    """Open incidents, oldest first."""
    evicted: Sequence[str] = ()
    """A sentence for each evicted worker or host."""
    now_s: float = 0.0
    """Wall-clock seconds since 1970, for the ages of incidents."""
    _graphs: list[Graph] = field(default_factory=list["Graph"], init=False, repr=False, compare=False)
    """Cache of the wait-for graph; empty until it is needed."""

    def awaited(self, row: WorkerRow) -> list[WorkerRow]:
        """Return the workers that a worker waits for, by the wait-for graph."""
        # Deferred: it imports numpy, which an answer without a ledger does not need.
        from pipeline.fleet.flow.bottleneck import graph_of, waited_for

        if not self._graphs:
            self._graphs.append(graph_of(self.workers))
        names = waited_for(self._graphs[0], row.worker)
        return [other for other in self.workers if other.worker in names]

    def row(self, worker: str) -> WorkerRow | None:
        """Return a worker's row; None if it has no heartbeat."""
        return next((row for row in self.workers if row.worker == worker), None)

    def rows(self, role: Role) -> list[WorkerRow]:
        return [row for row in self.workers if row.role is role]

    def healthy(self, role: Role) -> list[WorkerRow]:
        return [row for row in self.rows(role) if row.health is HealthKind.LIVE]

    def absent(self, role: Role | None = None) -> list[str]:
        there = {row.worker for row in self.workers}
        return [name for name, its in self.wanted.items() if name not in there and role in (None, its)]

    def depth(self, queue: str) -> int:
        stat = self.queues.get(queue)
        return stat.depth if stat else 0


@dataclass(frozen=True, slots=True)
class Chain:
    """A chain of waits, from the learner to a root cause."""

    links: tuple[str, ...]
    """Each link waits for the next; the last is the root cause."""
    cause: Cause
    who: str
    """Worker or queue at the root; may be empty."""
    outlook: Outlook
    next: str
    """What happens next, or what to do."""
    num_units: int = 1
    """How many of the sampled units wait for this root."""

    def after(self, *links: str) -> Chain:
        """Return the chain with these links in front."""
        return Chain((*links, *self.links), self.cause, self.who, self.outlook, self.next, self.num_units)


@dataclass(frozen=True, slots=True)
class Explanation:
    headline: str
    outlook: Outlook
    chains: tuple[Chain, ...]
    """Most important first."""
    also: tuple[str, ...] = ()

    @classmethod
    def of(cls, chains: Sequence[Chain], also: Sequence[str] = ()) -> Explanation:
        """Build an explanation from chains, most important first."""
        return cls("; ".join(chains[0].links), chains[0].outlook, tuple(chains), tuple(also))


def worst(chains: Sequence[Chain]) -> Chain:
    """Return the chain with the gravest outlook; the first one if several are equal."""
    return max(chains, key=lambda chain: chain.outlook.gravity)


def seconds(value: float) -> str:
    """Format a duration: ``0.4 s``, ``12 s``, ``3 min 5 s``, ``2 h 10 min``."""
    if value < 0.95:
        return f"{max(0.0, value):.1f} s"
    whole = round(value)
    if whole < 120:
        return f"{whole} s"
    if whole < 7200:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def _ordinal(number: int) -> str:
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"


def count(number: int, noun: str) -> str:
    """Return ``1 group``, ``3 groups``, ``2 trajectories``."""
    if number == 1:
        return f"1 {noun}"
    plural = noun[:-1] + "ies" if noun.endswith("y") else noun + "s"
    return f"{number:,} {plural}"
