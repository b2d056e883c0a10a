"""Who is there: incarnations and their epochs, endpoints, heartbeats, the desired fleet, published
weights.

Everything here is small, is about processes rather than about work, and lives beside the ledger
under the same server. Two implementations: ``MemoryRegistry`` (in this process) and
``RedisRegistry``; one contract suite.

*Consumes* registrations and heartbeats. *Produces* epochs and views of the fleet. *Waits for*
nothing, but for news as long as the caller says (``pipeline.runtime.notifications`` is who asks).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

import msgspec

from pipeline.process.work import WorkReport
from protocol.ids import Incarnation, Role


class WaitingFor(StrEnum):
    """What a worker's main loop is doing or waiting for, right now."""

    STARTING = "starting"
    INPUT = "input"
    """its mailbox, or work from the ledger"""
    ROOM = "room"
    """room in a scorer's mailbox"""
    CREDIT = "credit"
    COMPUTE = "compute"
    """not waiting: computing"""
    COMPILE = "compile"
    """computing something for the first time in this process: kernels are compiled, files are
    mapped
    """
    LEDGER = "ledger"
    """the server's answer"""
    WEIGHTS = "weights"
    QUARANTINE = "quarantine"
    """a version whose bytes match their digest, after one whose did not"""
    DISK = "disk"
    """a checkpoint to be written"""
    DRAINING = "draining"
    STOPPED = "stopped"


MAY_HOLD = frozenset({WaitingFor.CREDIT, WaitingFor.WEIGHTS, WaitingFor.STOPPED})
"""A worker that waits for these may hold work without progress: others end these waits, and have
deadlines for it.
"""


MAX_NAMED_LINKS = 8
"""Links that a heartbeat tells one by one at each end; it tells the others as one sum, so that it
does not grow with them.
"""
MAX_LINK_NAME_CHARS = 32
"""Of each worker's name in a link's."""
MAX_DETAIL_CHARS = 240
OTHER_LINKS = "(others)"
"""Stands for the peers of the links that are told as one sum."""


class LinkReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One link as its owner sees it, or the sum of several, for ``headrace queues``."""

    name: str
    """``generator-0>reward-0``, as ``link_name`` makes it"""
    sent: int = 0
    received: int = 0
    done: int = 0
    refused: int = 0
    gaps: int = 0


def link_name(sender: str, receiver: str) -> str:
    """Return a link's name. Both ends make the same one."""
    return f"{sender[:MAX_LINK_NAME_CHARS]}>{receiver[:MAX_LINK_NAME_CHARS]}"


def unreached_workers(words: str) -> set[str]:
    """Return the names of workers that a heartbeat's ``unreached`` begins its parts with: one a
    role that is not reached.
    """
    return {part.split()[0] for part in words.split("; ") if part.strip()}


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's state, written every second by a thread of its own.

    ``progress`` is counted by the main loop, so that a live heartbeat thread cannot hide a dead
    loop.
    """

    who: Incarnation
    pid: int
    host: str
    at_s: float
    """Wall-clock time of this heartbeat, seconds since 1970."""
    started_s: float
    progress: int
    """Turns of the main loop that did something, and computations that ended; only grows."""
    progress_at_s: float
    """When ``progress`` last grew."""
    waiting_for: WaitingFor
    detail: str = ""
    """In words, for people: ``reward-0 has no room``."""
    policy_version: int = -1
    """The version that this worker serves or has published; -1 when it has none."""
    rss_bytes: int = 0
    counters: dict[str, float] = {}
    """Role-specific, documented in each role's module."""
    links: tuple[LinkReport, ...] = ()
    turns: int = 0
    """Grows with every turn of the main loop, idle ones too; while it stands still the loop does.
    0: not told.
    """
    turned_at_s: float = 0.0
    """When ``turns`` last grew."""
    held: int = 0
    """Pieces of work that this worker has taken and not finished: trajectories, chunks, units. With
    some, it must progress.
    """
    begun: int = 0
    """How often work began after idleness: how long that lasted says nothing of the work."""
    moved_at_s: float = 0.0
    """When work last moved or began: what stands still, stands still since then. 0: not told."""
    work: WorkReport = WorkReport()
    """What was done inside the computing, or whatever else the main loop waits for."""
    storing: WorkReport = WorkReport()
    """... and inside the writing to the disk beside it."""
    unreached: str = ""
    """Endpoints that it has tried to reach in vain, in words; empty while it reaches all. See
    ``unreached_workers``.
    """
    refused: str = ""
    """What its disk refused it last, in words; empty while it takes everything."""


class WeightsAnnouncement(msgspec.Struct, frozen=True, kw_only=True):
    """A published policy version, or the weights below it."""

    policy_version: int
    """BASE_VERSION for the weights below the versions."""
    digest: str
    """xxh3-128 of all bytes of the file, as ``xxh3-128:hex``."""
    path: str
    """A safetensors file on the learner's host."""
    num_bytes: int
    host: str
    """Host of ``path``: generators on it map the file, others ask ``endpoint``."""
    endpoint: str = ""
    """Where the learner serves ranges of the file over ZeroMQ; empty when it serves none."""
    base: WeightsAnnouncement | None = None
    """With one, the file is an adapter, and these are the weights that it is added to. None: the
    file is the whole version.
    """


class RunState(StrEnum):
    """Where the whole run is."""

    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    """Drain and end: asked for by a person."""
    FINISHED = "finished"
    """The learner has all its updates; workers drain and end."""
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class RunStatus:
    """State of the run and the sentence that explains it."""

    state: RunState
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Fleet:
    """How many workers of each role are wanted."""

    counts: dict[Role, int] = field(default_factory=dict[Role, int])


class Topic(StrEnum):
    """What there is news of."""

    ENDPOINTS = "endpoints"
    """a mailbox was opened, or one's worker was fenced or has left; of one that fell silent nobody
    tells
    """
    RUN = "run"
    """the run's state"""
    WEIGHTS = "weights"
    """a version was published"""


class Registry(Protocol):
    """Who is there. Every call but ``news`` returns at once; all raise LedgerUnavailable when no
    server answers.
    """

    async def register(self, role: Role, worker: str) -> Incarnation:
        """Hand out the next epoch for this worker: every earlier incarnation of it is fenced from
        now on.
        """
        ...

    async def fence(self, worker: str) -> int:
        """Make the present incarnation of a worker powerless (it is dead, frozen or replaced);
        return the new epoch.
        """
        ...

    async def epoch(self, worker: str) -> int:
        """Return the newest epoch of a worker; 0 when it never registered."""
        ...

    async def set_endpoint(self, who: Incarnation, endpoint: str, *, public_key: str = "") -> None:
        """Say where this worker's mailbox listens. Raises Fenced."""
        ...

    async def endpoints(self, role: Role) -> dict[str, tuple[str, str]]:
        """Return worker -> (endpoint, public CURVE key or "") for every worker of a role that has
        heartbeats or was just registered, and is not departed."""
        ...

    async def depart(self, who: Incarnation) -> None:
        """Leave in good order: endpoint and heartbeat are removed."""
        ...

    async def heartbeats(self) -> list[Heartbeat]:
        """Return the last heartbeat of every worker that has not departed."""
        ...

    async def set_fleet(self, fleet: Fleet) -> None:
        """Set the desired number of workers by role."""
        ...

    async def fleet(self) -> Fleet | None:
        """Return the desired fleet; None when none was set."""
        ...

    async def announce_weights(self, who: Incarnation, weights: WeightsAnnouncement) -> None:
        """Publish a version. Versions only grow: a smaller or equal one raises ValueError. Raises
        Fenced.
        """
        ...

    async def weights(self) -> WeightsAnnouncement | None:
        """Return the newest published version."""
        ...

    async def set_run_status(self, status: RunStatus) -> None:
        """Set the run's state."""
        ...

    async def run_status(self) -> RunStatus:
        """Return the run's state; STARTING when none was set."""
        ...

    async def notifications(self, seen: Mapping[Topic, str], *, timeout_s: float) -> dict[Topic, str]:
        """Wait until there is something new of a topic in ``seen``, or ``timeout_s`` has passed.

        Args:
            seen: topic -> what an earlier call returned for it; "" for whoever has heard nothing
                yet.
            timeout_s: shorter than the client waits for an answer.

        Returns the topics that there is something new of, each with what to call it when asking
        again. What is told of can be read by then. News that came while nobody waited is told at
        the next call, several of a topic as one.
        """
        ...

    async def aclose(self) -> None:
        """Release connections. Repeated calls do nothing."""
        ...


class HeartbeatWriter(Protocol):
    """The blocking side, called from the heartbeat thread alone."""

    def beat(self, heartbeat: Heartbeat) -> bool:
        """Write a heartbeat; False when the incarnation is fenced."""
        ...

    def close(self) -> None:
        """Release the connection."""
        ...
