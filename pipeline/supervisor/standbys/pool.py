"""The life of each standby. Pure: times and signs are arguments, actions are returned.

    (wanted) ──start──> starting ──report──> ready ──take──> (a worker's process: no standby any more)
                           │ too slow           │ silent, or behind the newest weights for too long
                           ▼                    ▼
                         ending <──────────── ending ──exit──> (gone; another is started after a pause)

A standby's name is never used twice. A taken one belongs to exactly one worker from then on, and
the pool forgets it. One standby starts at a time, so that a refill takes little from the fleet.

Failures are ends without a take. Each doubles the pause before the next start. Too many in a row,
and the kind is given up: the run goes on with restarts in place."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from protocol.ids import Role


class StandbyKind(StrEnum):
    """The workers that a standby may become."""

    GENERIC = "standby"
    """A generator, reward, reference or value worker."""
    LEARNER = "learner-standby"


class StandbyPhase(StrEnum):
    """State of a standby."""

    STARTING = "starting"
    READY = "ready"
    ENDING = "ending"


class StandbyVerb(StrEnum):
    """Action on a standby."""

    START = "start"
    END = "end"


@dataclass(frozen=True, slots=True)
class StandbyAction:
    """One action on one standby."""

    verb: StandbyVerb
    name: str
    kind: StandbyKind
    reason: str = ""


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """Deadlines in seconds, and budgets."""

    start_timeout_s: float = 300.0
    """From a start to readiness, without any report of loading."""
    silent_after_s: float = 15.0
    """A ready one that has not reported for so long is replaced."""
    behind_s: float = 60.0
    """A ready one that has not taken a version so long after it was the newest is replaced."""
    pause_s: float = 5.0
    """After the first failure; each further one doubles it."""
    longest_pause_s: float = 300.0
    max_failures: int = 5
    """In a row."""


@dataclass(slots=True)
class Standby:
    """One standby process."""

    name: str
    kind: StandbyKind
    started_s: float
    phase: StandbyPhase = StandbyPhase.STARTING
    roles: frozenset[Role] = frozenset()
    """Of the workers that it may become, once it is ready."""
    version: int | None = None
    """Of the weights that it has; None where it follows none."""
    reported_s: float = 0.0
    awaited_version: int = -1
    """A version that it did not have when that was the newest."""
    behind_since_s: float = math.inf


@dataclass(slots=True)
class _Budget:
    num_failures: int = 0
    next_start_s: float = 0.0


class StandbyPool:
    """The standbys of one host."""

    def __init__(self, limits: PoolLimits | None = None) -> None:
        self._limits = limits or PoolLimits()
        self._wanted: dict[StandbyKind, int] = {}
        self._standbys: dict[str, Standby] = {}
        self._budgets = {kind: _Budget() for kind in StandbyKind}
        self._num_named = 0
        self._outdated: list[StandbyAction] = []
        self.refill_s: float | None = None
        """The newest time from a start to readiness; None before the first."""
        self.given_up: dict[StandbyKind, str] = {}
        """Kinds that are not started any more, each with the reason."""

    @property
    def standbys(self) -> tuple[Standby, ...]:
        """All that are there, in the order of their starts."""
        return tuple(self._standbys.values())

    @property
    def roles(self) -> frozenset[Role]:
        """The roles for which a standby is ready."""
        return frozenset[Role]().union(*(one.roles for one in self._ready()))

    def _ready(self) -> list[Standby]:
        return [one for one in self._standbys.values() if one.phase is StandbyPhase.READY]

    def want(self, numbers: Mapping[StandbyKind, int]) -> None:
        """Make ``numbers`` the wanted standbys, by kind."""
        self._wanted = dict(numbers)

    def reported(self, now_s: float, name: str, roles: frozenset[Role], version: int | None) -> None:
        """Note a sign of life. ``roles``: empty while it still loads."""
        standby = self._standbys.get(name)
        if standby is None or standby.phase is StandbyPhase.ENDING:
            return
        standby.reported_s, standby.version = now_s, version
        if roles and standby.phase is StandbyPhase.STARTING:
            standby.phase = StandbyPhase.READY
            self.refill_s = now_s - standby.started_s
            self._budgets[standby.kind] = _Budget()
        standby.roles = roles if standby.phase is StandbyPhase.READY else frozenset()

    def ended(self, now_s: float, name: str, reason: str) -> None:
        """Note the end of a standby's process. A taken one is a worker, and unknown here."""
        standby = self._standbys.pop(name, None)
        if standby is None or standby.phase is StandbyPhase.ENDING:
            return
        self._failed(now_s, standby.kind, reason)

    def renew(self, reason: str) -> None:
        """End all that are there, by the next ``tick``: others take their places. None failed."""
        for standby in self._standbys.values():
            if standby.phase is not StandbyPhase.ENDING:
                standby.phase, standby.roles = StandbyPhase.ENDING, frozenset()
                self._outdated.append(StandbyAction(StandbyVerb.END, standby.name, standby.kind, reason))

    def take(self, role: Role, *, but: frozenset[str] = frozenset()) -> str | None:
        """Give a ready standby for this role away; return its name, or None without one. The one
        with the newest weights is taken. ``but``: names that are not taken."""
        fit = [one for one in self._ready() if role in one.roles and one.name not in but]
        if not fit:
            return None
        best = max(fit, key=lambda one: -1 if one.version is None else one.version)
        del self._standbys[best.name]
        return best.name

    def tick(self, now_s: float, newest_version: int | None = None) -> list[StandbyAction]:
        """Return what is to be done now. ``newest_version``: of the published weights; None for
        none."""
        actions, self._outdated = self._outdated, []
        for standby in self._standbys.values():
            if reason := self._why_end(standby, now_s, newest_version):
                standby.phase = StandbyPhase.ENDING
                standby.roles = frozenset()
                self._failed(now_s, standby.kind, reason)
                actions.append(StandbyAction(StandbyVerb.END, standby.name, standby.kind, reason))
        for kind in StandbyKind:
            actions += self._sized(kind, now_s)
        return actions

    def _why_end(self, standby: Standby, now_s: float, newest_version: int | None) -> str:
        """Return why a standby is of no use any more, or ""."""
        limits = self._limits
        if standby.phase is StandbyPhase.STARTING:
            since_s = max(standby.started_s, standby.reported_s)
            return (
                f"not ready after {now_s - standby.started_s:.0f} s" if now_s - since_s > limits.start_timeout_s else ""
            )
        if standby.phase is StandbyPhase.ENDING:
            return ""
        if now_s - standby.reported_s > limits.silent_after_s:
            return f"no sign of it for {now_s - standby.reported_s:.0f} s"
        if standby.version is None or newest_version is None or standby.version >= newest_version:
            standby.behind_since_s = math.inf
        elif math.isinf(standby.behind_since_s) or standby.version >= standby.awaited_version:
            standby.awaited_version, standby.behind_since_s = newest_version, now_s
        if now_s - standby.behind_since_s > limits.behind_s:
            return f"it does not follow the weights: it has version {standby.version}, the newest is {newest_version}"
        return ""

    def _sized(self, kind: StandbyKind, now_s: float) -> list[StandbyAction]:
        """End surplus standbys of a kind, the newest first, or start one more."""
        there = [one for one in self._standbys.values() if one.kind is kind and one.phase is not StandbyPhase.ENDING]
        wanted = self._wanted.get(kind, 0)
        if len(there) > wanted:
            surplus = there[wanted:]
            for standby in surplus:
                standby.phase, standby.roles = StandbyPhase.ENDING, frozenset()
            return [StandbyAction(StandbyVerb.END, one.name, kind, "fewer are wanted") for one in surplus]
        is_starting = any(one.phase is StandbyPhase.STARTING for one in self._standbys.values())
        if len(there) == wanted or is_starting or kind in self.given_up or now_s < self._budgets[kind].next_start_s:
            return []
        self._num_named += 1
        name = f"{kind}-{self._num_named}"
        self._standbys[name] = Standby(name, kind, now_s, reported_s=now_s)
        return [StandbyAction(StandbyVerb.START, name, kind)]

    def _failed(self, now_s: float, kind: StandbyKind, reason: str) -> None:
        budget, limits = self._budgets[kind], self._limits
        budget.num_failures += 1
        pause_s = min(limits.pause_s * 2 ** (budget.num_failures - 1), limits.longest_pause_s)
        budget.next_start_s = now_s + pause_s
        if budget.num_failures > limits.max_failures:
            num = f"{budget.num_failures} in a row failed, {limits.max_failures} are allowed"
            self.given_up[kind] = f"{num}; the last one: {reason}"
