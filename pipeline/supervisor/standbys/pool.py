"""The life of each standby. Pure: times and reports are arguments, interventions are returned.

    (wanted) ──start──> starting ──report──> ready ──take──> (a worker's process: no standby any more)
                           │ too slow           │ silent, or behind the newest weights for too long
                           ▼                    ▼
                         ending <──────────── ending ──exit──> (gone; another is started after a pause)

A standby's name is never reused. Once taken it belongs to exactly one worker, and the pool forgets
it. Missing standbys of a kind start concurrently and load all their models: one after another, the
last would be ready too late for the next fault.

An end without a take is a failure. Each failure doubles the pause before the next start, and only
one starts at a time until one is ready. After too many in a row the kind is given up: the run goes
on with ordinary restarts."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Final

from pipeline.config.schema import RunConfig
from pipeline.supervisor.fleet_plan import Intervention, Verb
from protocol.ids import Role

# Estimates a standby's memory until one has reported it.
#
# It holds the models of all roles that it can take. Published weights do not count, since a generator
# maps them in place. Neither do gradients, optimiser state and caches, which the lost worker frees.

PROCESS_BYTES = 350 << 20
"""Python, torch and transformers without any model."""
LIGHT_BYTES = 70 << 20
ITEM_BYTES = {"float32": 4, "bfloat16": 2}
_STORED_BYTES = 2
"""Smallest stored size of a weight; wider files make the estimate larger."""


def standby_parts(config: RunConfig, roles: Iterable[Role]) -> dict[str, int]:
    """Return the bytes of a standby's parts, by purpose."""
    parts: dict[str, int] = {}
    for role in roles:
        match role:
            case Role.GENERATOR if config.has_sampling and not config.generation.has_own_engine:
                cache = config.generation.vllm.kv_cache_gb << 30 if config.generation.engine == "vllm" else 0
                parts["generator"] = _model(config.model.path, config.generation.dtype) + cache
            case Role.REFERENCE if not config.reference.has_own_engine:
                parts["reference"] = _model(config.reference_model, config.model.dtype)
            case Role.VALUE if not config.value.has_own_engine:
                parts["value"] = _model(config.value.path or config.model.path, "float32")
            case Role.REWARD if config.reward.model is not None:
                parts["reward model"] = _model(config.reward.model.path, "float32")
            case Role.LEARNER if not config.learner.has_own_engine:
                parts["learner"] = _model(config.model.path, "float32")
            case _:
                pass
    return {**parts, "process": PROCESS_BYTES if parts else LIGHT_BYTES}


def standby_bytes(config: RunConfig, roles: Iterable[Role]) -> int:
    return sum(standby_parts(config, roles).values())


def _model(folder: Path, dtype: str) -> int:
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    return size * ITEM_BYTES[dtype] // _STORED_BYTES


# How many standbys a fleet needs.
#
# N workers fail independently, each at rate r. During the time w that it takes to refill a standby, a
# worker fails with probability p = 1 - exp(-r w). The number of standbys is the smallest k with
#
#     P(Binomial(N, p) <= k) >= 0.99.
#
# Source: the warm standby policy of Wan et al., ByteRobust, SOSP 2025 (arXiv 2509.16293), which takes p
# over a day rather than over the measured refill time.

CONFIDENCE: Final = 0.99
DAY_S: Final = 86400.0
_LEAST_REPAIRS: Final = 3
"""With fewer repairs, a run's own failure rate would be mostly chance."""


def num_standbys(num_workers: int, rate_per_day: float, refill_s: float, *, confidence: float = CONFIDENCE) -> int:
    """Return the smallest number of standbys that suffices.

    Args:
        num_workers: Workers that standbys may replace.
        rate_per_day: Failures per worker and day.
        refill_s: Time from the use of a standby until the next one is ready, in seconds.
        confidence: Probability that they suffice."""
    within = 0.0
    for k, chance in enumerate(chances(num_workers, rate_per_day, refill_s)):
        within += chance
        if within >= confidence:
            return k
    return num_workers


def chances(num_workers: int, rate_per_day: float, seconds: float) -> Iterator[float]:
    """Yield the probabilities that exactly 0, 1, 2, ... of these workers fail within a time."""
    p = -math.expm1(-rate_per_day * seconds / DAY_S)
    if num_workers <= 0 or p <= 0.0 or p >= 1.0:
        yield from (float(k == (num_workers if p >= 1.0 else 0)) for k in range(max(0, num_workers) + 1))
        return
    # recurrence in logarithms, because (1 - p)^N underflows for large fleets
    log_term, log_odds = num_workers * math.log1p(-p), math.log(p) - math.log1p(-p)
    for k in range(num_workers + 1):
        yield math.exp(log_term)
        log_term += math.log(num_workers - k) - math.log(k + 1) + log_odds if k < num_workers else 0.0


def measured_rate(assumed_per_day: float, num_repairs: int, num_workers: int, run_s: float) -> float:
    """Return the failures per worker and day: the run's own rate if it is known and higher, else
    the assumed one.

    Args:
        assumed_per_day: From the settings.
        num_repairs: Repairs of this run so far.
        num_workers: Workers that could fail.
        run_s: Time over which the repairs were counted, in seconds."""
    if num_repairs < _LEAST_REPAIRS or num_workers <= 0 or run_s <= 0.0:
        return assumed_per_day
    return max(assumed_per_day, num_repairs * DAY_S / (num_workers * run_s))


class StandbyKind(StrEnum):
    """Which workers a standby can become."""

    GENERIC = "standby"
    """A generator, reward, reference or value worker."""
    LEARNER = "learner-standby"


class StandbyPhase(StrEnum):
    STARTING = "starting"
    READY = "ready"
    ENDING = "ending"


SILENT_AFTER_S: Final = 15.0
"""A ready standby that has not reported for this long is replaced."""
BEHIND_S: Final = 60.0
"""A ready standby that has not loaded a version this long after it was published is replaced."""
PAUSE_S: Final = 5.0
"""After the first failure; each further failure doubles it."""
LONGEST_PAUSE_S: Final = 300.0
MAX_FAILURES: Final = 5
"""In a row."""


@dataclass(slots=True)
class Standby:
    name: str
    kind: StandbyKind
    started_s: float
    phase: StandbyPhase = StandbyPhase.STARTING
    roles: frozenset[Role] = frozenset()
    """Roles that it can take, once it is ready."""
    version: int | None = None
    """Version of its weights; None if it follows none."""
    is_taking: bool = False
    """Whether it is loading a newer version, which delays orders."""
    progress: int = 0
    """Loading steps finished so far."""
    moved_s: float = 0.0
    """When ``progress`` last grew."""
    reported_s: float = 0.0
    awaited_version: int = -1
    """A newer version that it must catch up with in time."""
    behind_since_s: float = math.inf
    turn: int = 0
    """Of its newest report."""
    memory_bytes: int = 0
    """As last reported."""


@dataclass(slots=True)
class _Track:
    num_failures: int = 0
    """In a row."""
    next_start_s: float = 0.0
    uses_s: deque[float] = field(default_factory=deque[float])
    """When standbys were taken that are not refilled yet."""
    refill_s: float | None = None


class StandbyPool:
    def __init__(self, start_timeout_s: float) -> None:
        """``start_timeout_s``: without progress in loading models or weights."""
        self._start_timeout_s = start_timeout_s
        self._wanted: dict[StandbyKind, int] = {}
        self._standbys: dict[str, Standby] = {}
        self._tracks = {kind: _Track() for kind in StandbyKind}
        self._num_named = 0
        self._outdated: list[Intervention] = []
        self.given_up: dict[StandbyKind, str] = {}
        """Kinds that are no longer started, with the reason."""

    @property
    def standbys(self) -> tuple[Standby, ...]:
        """All standbys in the order of their starts."""
        return tuple(self._standbys.values())

    @property
    def roles(self) -> frozenset[Role]:
        """The roles that a ready standby can take."""
        return frozenset[Role]().union(*(one.roles for one in self._ready()))

    def _ready(self) -> list[Standby]:
        return [one for one in self._standbys.values() if one.phase is StandbyPhase.READY]

    def refill_s(self, kind: StandbyKind) -> float | None:
        """Return the last measured time from the use of a standby until the next one was ready;
        before the first use, the time to start one; None before that."""
        return self._tracks[kind].refill_s

    def find(self, name: str) -> Standby | None:
        return self._standbys.get(name)

    @property
    def present(self) -> dict[StandbyKind, int]:
        """How many of each kind there are, without those that end."""
        there = [one.kind for one in self._standbys.values() if one.phase is not StandbyPhase.ENDING]
        return {kind: there.count(kind) for kind in StandbyKind}

    def want(self, numbers: Mapping[StandbyKind, int]) -> None:
        self._wanted = dict(numbers)

    def reported(
        self,
        now_s: float,
        name: str,
        roles: frozenset[Role],
        version: int | None,
        *,
        progress: int = 0,
        is_taking: bool = False,
    ) -> bool:
        """Record a report; return whether the standby has just become ready. ``roles``: empty while
        it loads."""
        standby = self._standbys.get(name)
        if standby is None or standby.phase is StandbyPhase.ENDING:
            return False
        if progress != standby.progress:
            standby.progress, standby.moved_s = progress, now_s
        standby.reported_s, standby.version, standby.is_taking = now_s, version, is_taking
        is_new = bool(roles) and standby.phase is StandbyPhase.STARTING
        if is_new:
            standby.phase = StandbyPhase.READY
            track = self._tracks[standby.kind]
            track.refill_s = now_s - (track.uses_s.popleft() if track.uses_s else standby.started_s)
            track.num_failures, track.next_start_s = 0, 0.0
        standby.roles = roles if standby.phase is StandbyPhase.READY else frozenset()
        return is_new

    def ended(self, now_s: float, name: str, reason: str) -> None:
        standby = self._standbys.pop(name, None)
        if standby is None or standby.phase is StandbyPhase.ENDING:
            return
        self._failed(now_s, standby.kind, reason)

    def replace_all(self, reason: str) -> None:
        """At the next ``tick``, kill all present standbys and start others. Does not count as
        failure."""
        self._outdated += [
            _ending(one, reason) for one in self._standbys.values() if one.phase is not StandbyPhase.ENDING
        ]

    def take_ready(self, now_s: float, role: Role) -> str | None:
        """Remove a ready standby for this role from the pool; return its name, or None. Prefers
        standbys that are not loading weights, then the newest weights."""
        fit = [one for one in self._ready() if role in one.roles]
        if not fit:
            return None
        best = max(fit, key=lambda one: (not one.is_taking, -1 if one.version is None else one.version))
        del self._standbys[best.name]
        self._tracks[best.kind].uses_s.append(now_s)
        return best.name

    def tick(self, now_s: float, newest_version: int | None = None) -> list[Intervention]:
        """Return what is due, by standbys' names. ``newest_version``: of the published weights, if any."""
        actions, self._outdated = self._outdated, []
        for standby in self._standbys.values():
            if reason := self._why_end(standby, now_s, newest_version):
                self._failed(now_s, standby.kind, reason)
                actions.append(_ending(standby, reason))
        for kind in StandbyKind:
            actions += self._sized(kind, now_s)
        return actions

    def _why_end(self, standby: Standby, now_s: float, newest_version: int | None) -> str:
        if standby.phase is StandbyPhase.STARTING:
            is_late = now_s - standby.moved_s > self._start_timeout_s
            return f"not ready after {now_s - standby.started_s:.0f} s" if is_late else ""
        if standby.phase is StandbyPhase.ENDING:
            return ""
        if now_s - standby.reported_s > SILENT_AFTER_S:
            return f"no report for {now_s - standby.reported_s:.0f} s"
        if standby.version is None or newest_version is None or standby.version >= newest_version:
            standby.behind_since_s = math.inf
        elif math.isinf(standby.behind_since_s) or standby.version >= standby.awaited_version:
            standby.awaited_version, standby.behind_since_s = newest_version, now_s
        if now_s - standby.behind_since_s > (self._start_timeout_s if standby.is_taking else BEHIND_S):
            return f"it does not follow the weights: it has version {standby.version}, the newest is {newest_version}"
        return ""

    def _sized(self, kind: StandbyKind, now_s: float) -> list[Intervention]:
        """Kill surplus standbys of a kind, newest first, or start missing ones."""
        there = [one for one in self._standbys.values() if one.kind is kind and one.phase is not StandbyPhase.ENDING]
        wanted, track = self._wanted.get(kind, 0), self._tracks[kind]
        is_starting = any(one.phase is StandbyPhase.STARTING for one in there)
        num_ready = sum(one.phase is StandbyPhase.READY for one in there)
        while len(track.uses_s) > max(0, wanted - num_ready):
            # fewer are wanted than were used
            track.uses_s.popleft()
        if len(there) > wanted:
            return [_ending(one, "fewer are wanted") for one in there[wanted:]]
        if kind in self.given_up or now_s < track.next_start_s or (track.num_failures and is_starting):
            return []
        lacking = wanted - len(there)
        return [self._started(kind, now_s) for _ in range(min(lacking, 1) if track.num_failures else lacking)]

    def _started(self, kind: StandbyKind, now_s: float) -> Intervention:
        self._num_named += 1
        name = f"{kind}-{self._num_named}"
        self._standbys[name] = Standby(name, kind, now_s, moved_s=now_s, reported_s=now_s)
        return Intervention(name, Verb.START)

    def _failed(self, now_s: float, kind: StandbyKind, reason: str) -> None:
        track = self._tracks[kind]
        track.next_start_s = now_s + min(PAUSE_S * 2**track.num_failures, LONGEST_PAUSE_S)
        track.num_failures += 1
        if track.num_failures > MAX_FAILURES:
            num = f"{track.num_failures} in a row failed, {MAX_FAILURES} are allowed"
            self.given_up[kind] = f"{num}; the last one: {reason}"


def _ending(standby: Standby, reason: str) -> Intervention:
    standby.phase, standby.roles = StandbyPhase.ENDING, frozenset()
    return Intervention(standby.name, Verb.KILL, reason)
