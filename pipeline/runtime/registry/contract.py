"""The registry's contract: incarnations and epochs, endpoints, heartbeats, desired fleet, published weights.

The registry is small, is about processes rather than work, and is on the same server as the ledger.
``RedisRegistry`` implements it; one contract suite tests that and the tests' ``MemoryRegistry``."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple, Protocol

import msgspec

from pipeline.process.work import WorkReport
from pipeline.runtime.liveness import is_silent
from pipeline.runtime.registry.entries import CheckDigests, RelayAnnouncement, RelayPlace, Vitals, WeightsAnnouncement
from pipeline.runtime.registry.settings_change import SettingsChange, SettingsTaken
from pipeline.runtime.registry.waits import WaitingFor
from protocol.errors import Fenced
from protocol.ids import Incarnation, Role

UNUSABLE_IN_A_ROW = "unusable_in_a_row"
"""Counter of the learner: consecutive groups that were dropped because there was nothing to learn."""

MAX_NAMED_LINKS = 8
"""Links that a heartbeat reports individually at each end; the others are summed up."""
MAX_LINK_NAME_CHARS = 32
"""Longest part of a worker's name in a link's name."""
MAX_DETAIL_CHARS = 240
MAX_REACHING = 16
"""Most generators that ``reaching_generators`` returns."""
MAX_FAILURES = 32
"""Failures that a registry keeps, the newest ones."""
OTHER_LINKS = "(others)"
"""Name for the peers of links that are summed up."""


class LinkReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One link, or the sum of several, as counted at one end."""

    name: str
    """from ``link_name``, such as ``generator-0>reward-0``; ``generator-0>reward`` for messages that no link
    has taken yet"""
    sent: int = 0
    received: int = 0
    """received by the receiver's mailbox"""
    done: int = 0
    """finished by the receiver, with or without a result"""
    refused: int = 0
    gaps: int = 0
    produced: int = 0
    """handed to the sender for any worker of a role; only in the role's row"""
    stored: int = 0
    """results of the receiver that the ledger has: the acknowledgement"""
    open: int = 0
    """at the sender, waiting for a link; at the receiver, received but not finished"""
    oldest_age_s: float = 0.0
    """age of the oldest open message, by the reporter's monotonic clock"""


def link_name(sender: str, receiver: str) -> str:
    return f"{sender[:MAX_LINK_NAME_CHARS]}>{receiver[:MAX_LINK_NAME_CHARS]}"


def unreached_workers(words: str) -> set[str]:
    """Return the workers named in a heartbeat's ``unreached``: the first word of each part."""
    return {part.split()[0] for part in words.split("; ") if part.strip()}


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A worker's state, written every second or two by its heartbeat thread.

    The main loop counts ``progress``, so that a live heartbeat thread cannot hide a dead loop. Clocks of two
    hosts may differ, so its times are only compared with each other."""

    who: Incarnation
    pid: int
    host: str
    at_s: float
    """Wall-clock time of this heartbeat, seconds since 1970."""
    started_s: float
    progress: int
    """Productive turns of the main loop, and finished computations; only grows."""
    progress_at_s: float
    waiting_for: WaitingFor
    detail: str = ""
    """Text for people, such as ``reward-0 has no room``."""
    policy_version: int = -1
    """The version that this worker serves or has published; -1 if none."""
    rss_bytes: int = 0
    counters: dict[str, float] = {}
    """Role-specific counters, documented in each role's module."""
    links: tuple[LinkReport, ...] = ()
    turns: int = 0
    """Turns of the main loop, including idle ones; 0 if not reported."""
    turned_at_s: float = 0.0
    held: int = 0
    """Work taken but not finished: trajectories, chunks, units. It must make progress."""
    begun: int = 0
    """How often work started after idle time, which does not count as time spent on the work."""
    moved_at_s: float = 0.0
    """When work last progressed or began; 0 if not reported."""
    still_s: float = 0.0
    """Seconds at this wait, with work held or without any, since work last progressed or began."""
    work: WorkReport = WorkReport()
    """Work within the current computation or wait."""
    storing: WorkReport = WorkReport()
    """Work within the current write to the disk."""
    unreached: str = ""
    """Unreachable endpoints, for people; may be empty. ``unreached_workers`` parses it."""
    refused: str = ""
    """Why the disk last refused a write, for people; may be empty."""
    silent_s: float = 0.0
    """Set by the registry on reading: seconds since the heartbeat arrived, by the registry's clock."""
    clock_ahead_s: float = 0.0
    """Set by the registry: the worker's clock minus the registry's, at arrival."""
    vitals: Vitals | None = None
    """Measurements of its process and host; None from a worker of an earlier version."""
    settings: SettingsTaken = SettingsTaken()
    """Which change of the run's settings it has applied."""
    not_committed: str = ""
    """The last optimiser step that was refused twice, for people; shown for some seconds, otherwise empty."""
    check: CheckDigests = CheckDigests()
    """The newest answer to a self-check of the fleet."""

    @property
    def is_silent(self) -> bool:
        """Whether its last heartbeat came so long ago that no decision may count on it."""
        return is_silent(self.silent_s)

    @property
    def unmoved_s(self) -> float:
        """Seconds since work last progressed or began, at the time of the heartbeat."""
        return max(0.0, self.at_s - max(self.progress_at_s, self.moved_at_s))

    @property
    def reaches_scorers(self) -> bool:
        """Whether this is a generator with weights that can reach all scorers."""
        unreached = unreached_workers(self.unreached) - {Role.LEARNER}
        return self.who.role is Role.GENERATOR and self.policy_version >= 0 and not unreached


class FailureReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Why a worker ended by its own error, reported when it departs."""

    who: Incarnation
    error: str
    message: str
    """The error's text, at most ``MAX_DETAIL_CHARS``."""
    ago_s: float = 0.0
    """Set by the registry on reading: seconds since the departure, by the registry's clock."""


class RunState(StrEnum):
    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    """A person asked the run to drain and end."""
    FINISHED = "finished"
    """The learner has made all its updates; workers drain and end."""
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class RunStatus:
    """The run's state, with a sentence about it."""

    state: RunState
    detail: str = ""
    supervisor: int = 0
    """Process id of the supervisor that runs it, or is asked to stop; 0 if unknown."""


@dataclass(frozen=True, slots=True)
class Drain:
    """An operator's request that one worker finishes or gives back its work, and leaves."""

    worker: str
    epoch: int
    """Its newest incarnation at that time; later ones are not affected."""
    is_replaced: bool = False
    """Whether a new worker is started in its place."""


@dataclass(frozen=True, slots=True)
class Eviction:
    """A worker, or all workers of a joined host, that are not started until readmitted."""

    worker: str = ""
    """Empty if it is a host."""
    host: str = ""
    """Empty if it is a worker."""
    reason: str = ""
    by: str = ""
    """``supervisor``, or an operator's user and host."""
    at_s: float = 0.0
    """Seconds since 1970."""
    is_counted: bool = False
    """Whether its role has one worker fewer because of it."""

    @property
    def name(self) -> str:
        return self.worker or self.host


@dataclass(frozen=True, slots=True)
class Fleet:
    """The desired fleet: number of workers by role, and exceptions."""

    counts: dict[Role, int] = field(default_factory=dict[Role, int])
    is_by_hand: bool = False
    """Whether the number of generators was set by hand, instead of following demand."""
    demand: str = ""
    """Why there are this many generators, if their number follows demand."""
    drains: tuple[Drain, ...] = ()
    """Drains of single workers (``pipeline.supervisor.fleet_edits``)."""
    evictions: tuple[Eviction, ...] = ()
    """Evicted workers and joined hosts (``pipeline.supervisor.fleet_edits``)."""
    check: int = 0
    """Number of the newest self-check of the fleet; 0 if there was none."""

    @property
    def left_out(self) -> frozenset[str]:
        """Evicted workers, and those that drain without replacement."""
        return frozenset(drain.worker for drain in self.drains if not drain.is_replaced) | self.evicted

    @property
    def evicted(self) -> frozenset[str]:
        """Evicted workers, except those of evicted hosts."""
        return frozenset(one.worker for one in self.evictions if one.worker)

    def eviction_of(self, worker: str, host: str) -> Eviction | None:
        """Return the eviction of a worker on a host, or of that whole host; None if there is none."""
        named = {(worker, ""), ("", host)} - {("", "")}
        return next((one for one in self.evictions if (one.worker, one.host) in named), None)


class Topic(StrEnum):
    ENDPOINTS = "endpoints"
    """a mailbox was opened, or its worker was fenced, departed, fell silent or came back"""
    RUN = "run"
    """the run's state, its settings, or the desired fleet"""
    WEIGHTS = "weights"
    """a version was published"""


class FleetSummary(NamedTuple):
    """The fleet when a heartbeat arrived."""

    num_workers: int = 0
    """Workers that have not departed."""
    num_silent: int = 0
    """Those of them that have a mailbox but gave no sign of life for ``UNLISTED_AFTER_S``."""
    num_connects: int = 0
    """Connects of the writer; when it changes, this may be another server."""
    at_s: float = 0.0
    """The server's time, seconds since 1970; 0 if unknown."""


class Registry(Protocol):
    """The fleet's registry. Every call except ``notifications`` returns at once.

    All calls raise LedgerUnavailable when no server answers. Unreadable entries are left out of answers."""

    @property
    def unreadable(self) -> Mapping[str, str]:
        """Entries that could not be read last time, with the reason."""
        ...

    async def register(self, role: Role, worker: str) -> Incarnation:
        """Return a new incarnation with the next epoch; all earlier ones are fenced from now on."""
        ...

    async def fence(self, worker: str) -> int:
        """Fence a worker's current incarnation; return the new epoch."""
        ...

    async def epoch(self, worker: str) -> int:
        """Return a worker's newest epoch; 0 if it never registered."""
        ...

    async def set_endpoint(self, who: Incarnation, endpoint: str, *, public_key: str = "") -> None:
        """Set the address of this worker's mailbox. Raises Fenced."""
        ...

    async def endpoints(self, role: Role, *, silent: bool = False) -> dict[str, tuple[str, str]]:
        """Return worker -> (endpoint, public CURVE key or "") for a role.

        Includes workers that have not departed and recently registered or sent a heartbeat. ``silent`` also
        includes those without recent heartbeats, which may come back."""
        ...

    async def depart(self, who: Incarnation, failure: FailureReport | None = None) -> None:
        """Remove endpoint and heartbeat. ``failure`` is the error that ends the worker; None after a drain.
        Does nothing for a fenced incarnation."""
        ...

    async def failures(self) -> list[FailureReport]:
        """Return the newest failures first, at most ``MAX_FAILURES``."""
        ...

    async def heartbeats(self, role: Role | None = None, *, below_version: int | None = None) -> list[Heartbeat]:
        """Return the last heartbeat of every worker that has not departed, by name.

        Args:
            role: Only this role; others are not read.
            below_version: With a role, only workers at a lower policy version, or at none (-1)."""
        ...

    async def heartbeats_of(self, workers: Collection[str]) -> list[Heartbeat]:
        """Return the last heartbeats of those of these workers that have not departed, by name."""
        ...

    async def reaching_generators(self) -> dict[str, float]:
        """Return at most ``MAX_REACHING`` generators whose last heartbeat has ``reaches_scorers``, with the
        seconds since then."""
        ...

    async def set_fleet(self, fleet: Fleet) -> None: ...

    async def replace_fleet(self, present: Fleet | None, wanted: Fleet) -> bool:
        """Set the desired fleet if it is still ``present`` (None: not set); return whether it was."""
        ...

    async def fleet(self) -> Fleet | None:
        """Return the desired fleet; None before it is set."""
        ...

    async def add_settings_change(self, change: SettingsChange) -> bool:
        """Append a change of the run's settings if its number follows the last one's; return whether it does."""
        ...

    async def settings_changes(self) -> list[SettingsChange]:
        """Return all changes of the run's settings, in order."""
        ...

    async def last_settings_change(self) -> SettingsChange | None:
        """Return the last change of the run's settings; None before the first."""
        ...

    async def announce_weights(self, who: Incarnation, weights: WeightsAnnouncement) -> None:
        """Publish a version; a repeat changes nothing.

        Raises ValueError if it is not newer than the published one. Raises Fenced."""
        ...

    async def weights(self) -> WeightsAnnouncement | None: ...

    async def announce_relay(self, who: Incarnation, relay: RelayAnnouncement) -> RelayPlace:
        """Announce, or keep announced, that this worker serves versions; return its place.

        A relay keeps its place while its worker gives signs of life. Raises Fenced."""
        ...

    async def relays(self, who: Incarnation, positions: Sequence[int]) -> list[RelayAnnouncement]:
        """Return the live relays at these places, in the order of ``positions``.

        Only relays that arrived before ``who`` are returned, so that relays never wait for each other in a
        circle. Relays whose worker is silent or was fenced are removed."""
        ...

    async def check_entries(self) -> Mapping[str, str]:
        """Read every entry that a worker may write; return the unreadable ones, with the reason."""
        ...

    async def set_run_status(self, status: RunStatus) -> None: ...

    async def replace_run_status(self, present: RunStatus, wanted: RunStatus) -> bool:
        """Set the run's state if ``run_status`` is still ``present``; return whether it was."""
        ...

    async def run_status(self) -> RunStatus:
        """Return the run's state; STARTING before it is set."""
        ...

    async def notifications(self, seen: Mapping[Topic, str], *, timeout_s: float) -> dict[Topic, str]:
        """Wait up to ``timeout_s`` for changes of the topics in ``seen``.

        Args:
            seen: Topic -> cursor of an earlier call; "" at first.
            timeout_s: May be longer than the client's limit for an answer.

        Returns the changed topics, each with a cursor to pass as ``seen`` next time; by then the changes can
        be read. Changes between two calls are returned by the second call, once per topic. Silent workers are
        noticed at the end of a call. A server that lost its last writes returns the topics affected."""
        ...

    def look_again(self) -> None:
        """End a wait of ``notifications`` soon, since this may be another server."""
        ...

    async def aclose(self) -> None:
        """Close the connections. Repeated calls do nothing."""
        ...


class HeartbeatWriter(Protocol):
    """The blocking interface, for the heartbeat thread only."""

    @property
    def fleet(self) -> FleetSummary: ...

    def beat(self, heartbeat: Heartbeat) -> bool:
        """Write a heartbeat; return False when the incarnation is fenced."""
        ...

    def close(self) -> None: ...


def is_wanted(beat: Heartbeat, role: Role | None, below_version: int | None) -> bool:
    """Return whether ``heartbeats`` with these arguments returns this heartbeat."""
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
