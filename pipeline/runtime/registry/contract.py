"""The registry's contract: incarnations and epochs, endpoints, heartbeats, desired fleet, published
weights.

The registry is small, is about processes rather than work, and lives next to the ledger on the same
server. ``RedisRegistry`` implements it; one contract suite tests it and the tests' ``MemoryRegistry``."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple, Protocol

import msgspec

from pipeline.process.work import WorkReport
from pipeline.runtime.registry.entries import CheckDigests, RelayAnnouncement, RelayPlace, Vitals, WeightsAnnouncement
from pipeline.runtime.registry.settings_change import SettingsChange, SettingsTaken
from protocol.errors import Fenced
from protocol.ids import Incarnation, Role


class WaitingFor(StrEnum):
    """The present work or wait of a worker's main loop."""

    STARTING = "starting"
    INPUT = "input"
    """its mailbox, or work from the ledger"""
    ROOM = "room"
    """room in a scorer's mailbox"""
    CREDIT = "credit"
    COMPUTE = "compute"
    """not waiting: computing"""
    COMPILE = "compile"
    """a first computation in this process: kernels are compiled, files are mapped"""
    ENDPOINT = "endpoint"
    """a judge behind HTTP, which is down or limits the rate"""
    LEDGER = "ledger"
    """the server's answer"""
    WEIGHTS = "weights"
    QUARANTINE = "quarantine"
    """a version with the right digest, after one with a wrong digest"""
    DISK = "disk"
    """a checkpoint to be written"""
    DRAINING = "draining"
    STOPPED = "stopped"


UNUSABLE_IN_A_ROW = "unusable_in_a_row"
"""Counter of the learner: groups that were dropped one after another with nothing to learn from."""

MAY_HOLD = frozenset({WaitingFor.CREDIT, WaitingFor.WEIGHTS, WaitingFor.STOPPED})
"""Waits in which a worker may hold work without progress: others end these waits,
with deadlines."""


MAX_NAMED_LINKS = 8
"""Links that a heartbeat reports singly at each end; the others are one sum, of constant size."""
MAX_LINK_NAME_CHARS = 32
"""Limit of each worker's name in a link's name."""
MAX_DETAIL_CHARS = 240
MAX_REACHING = 16
"""Generators that ``reaching_generators`` returns."""
MAX_FAILURES = 32
"""Newest failures that a registry keeps."""
OTHER_LINKS = "(others)"
"""Name of the peers in the sum of other links."""


class LinkReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One link as its owner counts it, or the sum of several."""

    name: str
    """``generator-0>reward-0``, as ``link_name`` makes it; ``generator-0>reward`` for messages that
    no link has taken yet"""
    sent: int = 0
    received: int = 0
    """by the receiver's mailbox"""
    done: int = 0
    """worked on to the end by the receiver, with a result or without"""
    refused: int = 0
    gaps: int = 0
    produced: int = 0
    """handed to the sender for any worker of a role: only in the row of the role"""
    stored: int = 0
    """results of the receiver that the ledger has: the acknowledgement"""
    open: int = 0
    """at the sender, produced and waiting for a link; at the receiver, received and not ended"""
    oldest_age_s: float = 0.0
    """of the open ones, by the owner's monotonic clock"""


def link_name(sender: str, receiver: str) -> str:
    """Return a link's name, the same at both ends."""
    return f"{sender[:MAX_LINK_NAME_CHARS]}>{receiver[:MAX_LINK_NAME_CHARS]}"


def unreached_workers(words: str) -> set[str]:
    """Return the workers named in a heartbeat's ``unreached``: the first word of each part."""
    return {part.split()[0] for part in words.split("; ") if part.strip()}


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A worker's state, written every second or two by its heartbeat thread.

    The main loop counts ``progress``, so that a live heartbeat thread cannot hide a dead loop.
    Clocks of two hosts may differ: its times are compared only with one another."""

    who: Incarnation
    pid: int
    host: str
    at_s: float
    """Wall-clock time of this heartbeat, seconds since 1970."""
    started_s: float
    progress: int
    """Productive turns of the main loop, and finished computations; only grows."""
    progress_at_s: float
    """Time when ``progress`` last grew."""
    waiting_for: WaitingFor
    detail: str = ""
    """In words: ``reward-0 has no room``."""
    policy_version: int = -1
    """The version that this worker serves or has published; -1 for none."""
    rss_bytes: int = 0
    counters: dict[str, float] = {}
    """Role-specific, documented in each role's module."""
    links: tuple[LinkReport, ...] = ()
    turns: int = 0
    """Turns of the main loop, idle ones too; 0: not reported."""
    turned_at_s: float = 0.0
    """Time when ``turns`` last grew."""
    held: int = 0
    """Work taken and not finished: trajectories, chunks, units. It must make progress."""
    begun: int = 0
    """Starts of work after idleness; the idle time does not count as time on the work."""
    moved_at_s: float = 0.0
    """Time when work last moved or began; 0: not reported."""
    work: WorkReport = WorkReport()
    """Work inside the present computation or wait."""
    storing: WorkReport = WorkReport()
    """Work inside the present write to the disk."""
    unreached: str = ""
    """Unreachable endpoints, in words; empty for none. ``unreached_workers`` reads it."""
    refused: str = ""
    """Last refusal of its disk, in words; empty without one."""
    silent_s: float = 0.0
    """Set by the registry when it is read: seconds since its arrival, by the registry's clock."""
    clock_ahead_s: float = 0.0
    """Set by the registry: the worker's clock less the registry's, at its arrival."""
    vitals: Vitals | None = None
    """Measurements of its process and host; None from a worker of an earlier version."""
    settings: SettingsTaken = SettingsTaken()
    """Which change of the run's settings it has applied."""
    not_committed: str = ""
    """The last optimiser step that was refused twice, in words, for some seconds; empty without
    one."""
    check: CheckDigests = CheckDigests()
    """The newest answer to a self-check of the fleet."""

    @property
    def reaches_scorers(self) -> bool:
        """Whether this is a generator with weights that names no scorer as unreachable."""
        unreached = unreached_workers(self.unreached) - {Role.LEARNER}
        return self.who.role is Role.GENERATOR and self.policy_version >= 0 and not unreached


class FailureReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A worker that ended by its own error, as it reports at its departure."""

    who: Incarnation
    error: str
    """Class of the error."""
    message: str
    """Its sentence, in at most ``MAX_DETAIL_CHARS``."""
    ago_s: float = 0.0
    """Set by the registry when it is read: seconds since the departure, by the registry's clock."""


class RunState(StrEnum):
    """State of the whole run."""

    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    """A person has requested drain and end."""
    FINISHED = "finished"
    """The learner has all its updates; workers drain and end."""
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class RunStatus:
    """The run's state, and a sentence about it."""

    state: RunState
    detail: str = ""
    supervisor: int = 0
    """Process id of the supervisor that the state is of: the one that runs it, or is asked to stop; 0
    where that is not said."""


@dataclass(frozen=True, slots=True)
class Drain:
    """An operator's request that one worker finishes or gives back what it holds, and leaves."""

    worker: str
    epoch: int
    """Its newest incarnation then; newer ones are not meant."""
    is_replaced: bool = False
    """Whether a fresh one is started in its place."""


@dataclass(frozen=True, slots=True)
class Eviction:
    """One worker, or all of one joined host, that is not started until it is readmitted."""

    worker: str = ""
    """Empty for a host."""
    host: str = ""
    """Empty for a worker."""
    reason: str = ""
    by: str = ""
    """``supervisor``, or an operator's user and host."""
    at_s: float = 0.0
    """Seconds since 1970."""
    is_counted: bool = False
    """Whether its role has one worker fewer for it."""

    @property
    def name(self) -> str:
        """The worker, or the host."""
        return self.worker or self.host


@dataclass(frozen=True, slots=True)
class Fleet:
    """Desired number of workers by role."""

    counts: dict[Role, int] = field(default_factory=dict[Role, int])
    is_by_hand: bool = False
    """Whether the number of generators was set by hand, and does not follow demand."""
    demand: str = ""
    """Why there are so many generators, where their number follows demand."""
    drains: tuple[Drain, ...] = ()
    """Of single workers (``pipeline.supervisor.fleet_edits``)."""
    evictions: tuple[Eviction, ...] = ()
    """Of workers and joined hosts (``pipeline.supervisor.fleet_edits``)."""
    check: int = 0
    """Number of the newest self-check of the fleet; 0 for none."""

    @property
    def left_out(self) -> frozenset[str]:
        """Workers that drain and are not replaced, and evicted ones."""
        return frozenset(drain.worker for drain in self.drains if not drain.is_replaced) | self.evicted

    @property
    def evicted(self) -> frozenset[str]:
        """Evicted workers; those of evicted hosts apart."""
        return frozenset(one.worker for one in self.evictions if one.worker)

    def eviction_of(self, worker: str, host: str) -> Eviction | None:
        """Return the eviction of a worker on a host, or of all of that host; None without one."""
        named = {(worker, ""), ("", host)} - {("", "")}
        return next((one for one in self.evictions if (one.worker, one.host) in named), None)


class Topic(StrEnum):
    """Subject of news."""

    ENDPOINTS = "endpoints"
    """a mailbox was opened, or its worker was fenced, has departed, fell silent or is back"""
    RUN = "run"
    """the run's state, its settings, or the desired fleet"""
    WEIGHTS = "weights"
    """a version was published"""


class FleetSummary(NamedTuple):
    """The fleet at a heartbeat's arrival."""

    num_workers: int = 0
    """That have not departed."""
    num_silent: int = 0
    """Of them with a mailbox, and without a sign of life for ``UNLISTED_AFTER_S``."""
    num_connects: int = 0
    """Of the writer. A change of it means: perhaps another server."""
    at_s: float = 0.0
    """The server's time, seconds since 1970; 0: unknown."""


class Registry(Protocol):
    """The fleet's registry. Every call but ``news`` returns at once.

    All calls raise LedgerUnavailable when no server answers. Entries that cannot be read are left
    out of their answers."""

    @property
    def unreadable(self) -> Mapping[str, str]:
        """Entries that this reader could not read at their last reading, with the reason."""
        ...

    async def register(self, role: Role, worker: str) -> Incarnation:
        """Return a new incarnation with the next epoch; all earlier ones are fenced from now on."""
        ...

    async def fence(self, worker: str) -> int:
        """Fence the present incarnation of a worker; return the new epoch."""
        ...

    async def epoch(self, worker: str) -> int:
        """Return the newest epoch of a worker; 0 for one that never registered."""
        ...

    async def set_endpoint(self, who: Incarnation, endpoint: str, *, public_key: str = "") -> None:
        """Set the address of this worker's mailbox. Raises Fenced."""
        ...

    async def endpoints(self, role: Role, *, silent: bool = False) -> dict[str, tuple[str, str]]:
        """Return worker -> (endpoint, public CURVE key or "") of a role.

        These are workers with recent heartbeats or a recent registration, which have not departed.
        With ``silent`` also those without recent heartbeats: they may come back."""
        ...

    async def depart(self, who: Incarnation, failure: FailureReport | None = None) -> None:
        """Remove endpoint and heartbeat. ``failure``: the error that ends the worker; None after a
        drain. Of a fenced incarnation nothing is removed or kept."""
        ...

    async def failures(self) -> list[FailureReport]:
        """Return the newest failures, at most ``MAX_FAILURES``, the newest first."""
        ...

    async def heartbeats(self, role: Role | None = None, *, below_version: int | None = None) -> list[Heartbeat]:
        """Return the last heartbeat of every worker that has not departed, by name.

        Args:
            role: of this role only; others are not read.
            below_version: with a role, those at a lower policy version, or at none (-1)."""
        ...

    async def heartbeats_of(self, workers: Collection[str]) -> list[Heartbeat]:
        """Return the last heartbeats of these workers, of those that have not departed, by name."""
        ...

    async def reaching_generators(self) -> dict[str, float]:
        """Return generators whose last heartbeat has ``reaches_scorers``, at most 16 of them, with
        the seconds since that heartbeat."""
        ...

    async def set_fleet(self, fleet: Fleet) -> None:
        """Set the desired number of workers by role."""
        ...

    async def replace_fleet(self, present: Fleet | None, wanted: Fleet) -> bool:
        """Set the desired fleet if it is still ``present``; None: if none is set. Return whether."""
        ...

    async def fleet(self) -> Fleet | None:
        """Return the desired fleet; None before it is set."""
        ...

    async def add_settings_change(self, change: SettingsChange) -> bool:
        """Append a change of the run's settings, if its number follows the last one's; return
        whether."""
        ...

    async def settings_changes(self) -> list[SettingsChange]:
        """Return all changes of the run's settings, in their order."""
        ...

    async def last_settings_change(self) -> SettingsChange | None:
        """Return the last change of the run's settings; None before the first."""
        ...

    async def announce_weights(self, who: Incarnation, weights: WeightsAnnouncement) -> None:
        """Publish a version; a repeat changes nothing.

        Raises ValueError for one that is not newer than the published one. Raises Fenced."""
        ...

    async def weights(self) -> WeightsAnnouncement | None:
        """Return the newest published version."""
        ...

    async def announce_relay(self, who: Incarnation, relay: RelayAnnouncement) -> RelayPlace:
        """Publish, or keep published, that this worker serves versions; return its place.

        A relay keeps its place in the order while its worker gives signs of life. Raises Fenced."""
        ...

    async def relays(self, who: Incarnation, positions: Sequence[int]) -> list[RelayAnnouncement]:
        """Return the live relays among these places, in the order of ``positions``.

        Only relays that came before ``who`` are returned, so that relays never wait for one another
        in a circle. Relays whose worker is silent, or was fenced, are forgotten."""
        ...

    async def check_entries(self) -> Mapping[str, str]:
        """Read every entry that a worker may write; return those that cannot be read, with the
        reason."""
        ...

    async def set_run_status(self, status: RunStatus) -> None:
        """Set the run's state."""
        ...

    async def replace_run_status(self, present: RunStatus, wanted: RunStatus) -> bool:
        """Set the run's state if ``run_status`` is still ``present``; return whether."""
        ...

    async def run_status(self) -> RunStatus:
        """Return the run's state; STARTING before it is set."""
        ...

    async def notifications(self, seen: Mapping[Topic, str], *, timeout_s: float) -> dict[Topic, str]:
        """Wait for changes of the topics in ``seen``, at most ``timeout_s``.

        Args:
            seen: topic -> cursor of an earlier call; "" at first.
            timeout_s: also longer than the client's limit for an answer.

        Return the changed topics, each with a cursor to pass as ``seen`` next time. The change can
        be read by then. Changes between two calls are returned by the second, several of a topic as
        one. Silence is noticed at the end of a call. A server that has lost its last writes returns
        the topics that they were of."""
        ...

    def look_again(self) -> None:
        """End a present wait of ``notifications`` soon: the server may be another one."""
        ...

    async def aclose(self) -> None:
        """Release connections. Repeated calls do nothing."""
        ...


class HeartbeatWriter(Protocol):
    """The blocking side, for the heartbeat thread alone."""

    @property
    def fleet(self) -> FleetSummary:
        """The fleet as of the last heartbeat."""
        ...

    def beat(self, heartbeat: Heartbeat) -> bool:
        """Write a heartbeat; return False when the incarnation is fenced."""
        ...

    def close(self) -> None:
        """Release the connection."""
        ...


def is_wanted(beat: Heartbeat, role: Role | None, below_version: int | None) -> bool:
    """Return whether ``heartbeats`` returns this one for its arguments."""
    is_below = below_version is None or beat.policy_version < below_version
    return role is None or (beat.who.role is role and is_below)


def check_newest(who: Incarnation, newest: int) -> None:
    """Raise Fenced unless ``who`` is its worker's newest incarnation."""
    if who.epoch != newest:
        raise Fenced(
            f"{who} is fenced: the newest epoch of {who.worker} is {newest}, so another incarnation has replaced it; "
            "end this process"
        )


def check_grows(weights: WeightsAnnouncement, published: int) -> None:
    """Raise ValueError unless the announced version is newer than the published one."""
    if weights.policy_version <= published:
        raise ValueError(
            f"announced policy version {weights.policy_version}, but {published} is published; versions only grow: "
            f"publish {published + 1} or later"
        )
