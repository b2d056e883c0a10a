"""The values of an explanation: the snapshot, chains with causes and outlooks, and their words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from pipeline.observability.status import Health, WorkerRow
from pipeline.runtime.liveness import RESTARTED_WITHIN_S
from protocol.ids import Role

if TYPE_CHECKING:
    from pipeline.flow.graph import Graph
    from pipeline.incidents.records import Incident
    from pipeline.ledger.admin import Waits
    from pipeline.ledger.types import QueueStat, Totals
    from pipeline.runtime.registry.contract import RunState

_NO_ROOM = "No space left on device"


class Outlook(StrEnum):
    """The future of a wait."""

    MOVES = "moves"
    """Ordinary work; nothing is wrong."""
    MENDS = "mends"
    """Something is wrong, and the run repairs it by itself."""
    YOU = "you"
    """It waits for a person."""
    ENDED = "ended"
    """The run is over, or nearly."""


class Cause(StrEnum):
    """The root of a chain."""

    WORKING = "working"
    ABSENT = "absent"
    """A wanted worker without a process, or without a heartbeat yet."""
    SILENT = "silent"
    STUCK = "stuck"
    STARTING = "starting"
    DRAINING = "draining"
    LEASE = "lease"
    """Held by a dead incarnation; the next lease call of a generator takes it."""
    REDELIVERY = "redelivery"
    """The scorer is idle, so the message was lost; its deadline hands the chunk out again."""
    LEDGER = "ledger"
    """The ledger's server does not answer, or is full."""
    DISK = "disk"
    """No room, or no right to write, in a folder that the chain names."""
    MEMORY = "memory"
    """The ledger is over its watermark; admission has stopped."""
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
    """All groups of late had nothing to learn from."""
    EXHAUSTED = "exhausted"
    CLOSED = "closed"
    PAUSED = "paused"
    """An operator has paused admission."""
    FAILED = "failed"
    """A worker ended in a way that restarts do not repair, or too often."""
    SUPERVISOR = "supervisor"
    """Workers go on, but dead ones are not started again."""
    NOBODY = "nobody"
    """The run has no process."""


@dataclass(frozen=True, slots=True)
class CriticNeeds:
    """The critic gate's conditions."""

    min_explained_variance: float | None
    pretrain_steps: int
    batch_trajectories: int


@dataclass(frozen=True, slots=True)
class Ended:
    """How a worker's last process ended; ``str()`` gives it in words."""

    how: str
    ago_s: float
    num: int = 1
    """Processes that ended lately, this one included."""
    error: str = ""
    is_replaced: bool = False
    """The supervisor killed it, frozen or stuck."""

    @property
    def is_without_room(self) -> bool:
        """Whether a full disk ended it just now; its next process may end in the same way."""
        return _NO_ROOM in self.error and self.ago_s < RESTARTED_WITHIN_S

    @property
    def is_worth_a_word(self) -> bool:
        """Whether it matters although the worker is back."""
        return bool(self.error) or self.num > 1

    def __str__(self) -> str:
        """Return the end in words."""
        words = self.how + (f" by {self.error}" if self.error else "") + f", {seconds(self.ago_s)} ago"
        return words if self.num == 1 else f"{words}, the {_ordinal(self.num)} time within 10 min"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A run at one moment."""

    run: str
    """Its folder."""
    state: RunState
    detail: str
    has_supervisor: bool
    workers: Sequence[WorkerRow] = ()
    wanted: Mapping[str, Role] = field(default_factory=dict[str, Role])
    """Roles of the workers that should be there, by name."""
    waits: Waits | None = None
    """None when the ledger does not answer."""
    totals: Totals | None = None
    queues: Mapping[str, QueueStat] = field(default_factory=dict)
    critic: CriticNeeds | None = None
    """None in a run without a critic."""
    ledger_error: str = ""
    unwritten: str | None = None
    """Folder that the ledger's server cannot write to; None while it can."""
    exits: Mapping[str, Ended] = field(default_factory=dict[str, "Ended"])
    """The last end of each worker that has an ended process, by name."""
    replaced_after_s: float = 10.0
    """Seconds of silence before the supervisor replaces a worker."""
    incidents: Sequence[Incident] = ()
    """Those that are open, the oldest first."""
    evicted: Sequence[str] = ()
    """A sentence on each evicted worker and host."""
    now_s: float = 0.0
    """Wall-clock seconds since 1970, to which incidents' ages count."""
    _graphs: list[Graph] = field(default_factory=list["Graph"], init=False, repr=False, compare=False)
    """Which worker waits for which, by ``workers``; empty before the first question."""

    def awaited(self, row: WorkerRow) -> list[WorkerRow]:
        """Return the workers that a worker waits for, by the wait-for graph."""
        # Deferred: it imports numpy, and an answer without a ledger needs no graph.
        from pipeline.observability.wait_graph import graph_of, waited_for

        if not self._graphs:
            self._graphs.append(graph_of(self.workers))
        names = waited_for(self._graphs[0], row.worker)
        return [other for other in self.workers if other.worker in names]

    def row(self, worker: str) -> WorkerRow | None:
        """Return a worker's row; None when it has no heartbeat."""
        return next((row for row in self.workers if row.worker == worker), None)

    def rows(self, role: Role) -> list[WorkerRow]:
        """Return the rows of a role."""
        return [row for row in self.workers if row.role is role]

    def healthy(self, role: Role) -> list[WorkerRow]:
        """Return the live workers of a role."""
        return [row for row in self.rows(role) if row.health is Health.LIVE]

    def absent(self, role: Role | None = None) -> list[str]:
        """Return the names of wanted workers without a heartbeat."""
        there = {row.worker for row in self.workers}
        return [name for name, its in self.wanted.items() if name not in there and role in (None, its)]

    def depth(self, queue: str) -> int:
        """Return a queue's depth; 0 for an absent queue."""
        stat = self.queues.get(queue)
        return stat.depth if stat else 0


@dataclass(frozen=True, slots=True)
class Chain:
    """A chain of waits, from the learner to its root."""

    links: tuple[str, ...]
    """Each waits for the next; the last is the root."""
    cause: Cause
    who: str
    """Worker or queue at the root, or empty."""
    outlook: Outlook
    next: str
    """The next event, or the remedy."""
    num_units: int = 1
    """Sampled units that wait for this root."""

    def after(self, *links: str) -> Chain:
        """Return the chain with links before it."""
        return Chain((*links, *self.links), self.cause, self.who, self.outlook, self.next, self.num_units)


@dataclass(frozen=True, slots=True)
class Explanation:
    """The answer of ``headrace why``."""

    headline: str
    outlook: Outlook
    chains: tuple[Chain, ...]
    """Most important first."""
    also: tuple[str, ...] = ()

    @classmethod
    def of(cls, chains: Sequence[Chain], also: Sequence[str] = ()) -> Explanation:
        """Return an explanation whose first chain matters most."""
        return cls("; ".join(chains[0].links), chains[0].outlook, tuple(chains), tuple(also))


_WEIGHT = {Outlook.YOU: 3, Outlook.MENDS: 2, Outlook.ENDED: 1, Outlook.MOVES: 0}


def worst(chains: Sequence[Chain]) -> Chain:
    """Return the chain with the gravest outlook; of equals the first."""
    return max(chains, key=lambda chain: _WEIGHT[chain.outlook])


def gravity(chain: Chain) -> int:
    """Return the weight of a chain's outlook, for sorting."""
    return _WEIGHT[chain.outlook]


def seconds(value: float) -> str:
    """Return a duration in words: ``0.4 s``, ``12 s``, ``3 min 5 s``, ``2 h 10 min``."""
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
