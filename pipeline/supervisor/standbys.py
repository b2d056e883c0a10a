"""Warm standbys: processes with models loaded that can replace a lost worker within seconds.

``StandbyPool`` is the life of each standby. Pure: times and reports are arguments, interventions are
returned.

    (wanted) ──start──> starting ──report──> ready ──take──> (a worker's process: no standby any more)
                           │ too slow           │ silent, or behind the newest weights for too long
                           ▼                    ▼
                         ending <──────────── ending ──exit──> (gone; another is started after a pause)

A standby's name is never reused. Once taken it belongs to exactly one worker, and the pool forgets
it. Missing standbys of a kind start concurrently and load all their models: one after another, the
last would be ready too late for the next fault.

An end without a take is a failure. Each failure doubles the pause before the next start, and only
one starts at a time until one is ready. After too many in a row the kind is given up: the run goes
on with ordinary restarts.

The supervisor calls ``StandbyKeeper`` twice a second with heartbeats; it decides how many there are,
reads their reports, wants standbys started and killed (``executor``), and orders them to become
workers. Standbys only serve this host: roles that a launcher starts, and joined hosts, have none."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Final

import structlog

from pipeline.config.schema import RunConfig
from pipeline.fleet.state import Worker
from pipeline.process.records import (
    StandbyOrder,
    StandbyReport,
    clear_standbys,
    give_order,
    order_path,
    read_report,
    remove_report,
)
from pipeline.runtime.machine import free_memory
from pipeline.runtime.registry.contract import WaitingFor
from pipeline.supervisor.fleet_plan import Intervention, Verb
from pipeline.supervisor.processes import Processes
from protocol import headrace
from protocol.ids import ELASTIC_ROLES, Role

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
                parts["generator"] = _model(config.model.path, config.types.generator) + cache
            case Role.REFERENCE if not config.reference.has_own_engine:
                parts["reference"] = _model(config.reference_model, config.types.learner)
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
    """Any worker but the learner and the observer."""
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


WORTH_S: Final = 10.0
"""A start must take at least this long to justify a standby."""
GENERIC_ROLES: Final = (*ELASTIC_ROLES, Role.VALUE)
_GPUS = "nvidia[0-9]*"
_ROOM = "-" * 80
"""Padding argument that reserves space for the longer command line of the worker it becomes."""
_OBEYED_S = 5.0
_FIRST_REFILL_S = 60.0
"""Assumed until the first refill is measured."""
_TIMES_LOAD, _LOAD_SLACK_S = 2.0, 10.0
"""A worker that takes longer than this multiple of its role's shortest start, plus the slack, no
longer delays standbys."""

log = structlog.get_logger(__name__)


def standby_roles(config: RunConfig, kind: StandbyKind) -> tuple[Role, ...]:
    """Return the roles that a standby of this kind prepares for and can take; () for none."""
    if kind is StandbyKind.LEARNER:
        return (Role.LEARNER,) if config.learner.ranks == 1 else ()
    fleet = config.fleet
    is_wanted = {
        Role.GENERATOR: bool(fleet.generator),
        Role.REWARD: bool(fleet.reward),
        Role.REFERENCE: bool(fleet.reference) and config.has_reference,
        Role.ENVIRONMENT: bool(fleet.environment) and config.has_environment,
        Role.VALUE: config.has_critic and config.value.ranks == 1,
    }
    return tuple(role for role in GENERIC_ROLES if is_wanted[role] and role not in config.launch.launched)


def standby_command(run_dir: Path, name: str, roles: Sequence[Role]) -> list[str]:
    return headrace.command("workers.standby", str(run_dir), name, _ROOM, *map(str, roles))


class StandbyKeeper:
    def __init__(
        self, config: RunConfig, run_dir: Path, processes: Processes, free: Callable[[], int] = free_memory
    ) -> None:
        """``free``: returns the free memory of this host in bytes."""
        self._config, self._run_dir, self._processes, self._free = config, run_dir, processes, free
        self._roles = {kind: standby_roles(config, kind) for kind in StandbyKind}
        self._pool = StandbyPool(config.supervisor.start_timeout_s)
        self._children = processes.standbys
        self._orders: dict[str, tuple[str, float]] = {}
        """The worker to become, and when that was ordered, by standby."""
        self._starts: dict[str, tuple[Role, float]] = {}
        """Worker starts in progress, by worker."""
        self._loads: dict[Role, float] = {}
        """The shortest start of each role, in seconds."""
        self._away: dict[str, float] = {}
        """Since when wanted workers are not at work, by name."""
        self._bytes: dict[StandbyKind, int] = {}
        """Memory of a ready standby, as last reported."""
        self._num_repairs = 0
        self._began_s: float | None = None
        self._said: dict[StandbyKind, str] = {}
        """The last shortage of each kind that was logged."""
        self._is_clear = False

    @property
    def roles(self) -> frozenset[Role]:
        return self._pool.roles

    def started(self, now_s: float, worker: str, role: Role) -> None:
        """Note when a worker's new process started, to measure how long that takes."""
        self._starts[worker] = role, now_s

    def repaired(self, role: Role) -> None:
        self._num_repairs += role in self._roles[StandbyKind.GENERIC]

    # -- taking over -------------------------------------------------------------------------------

    def take_over(self, now_s: float, role: Role, worker: str) -> str | None:
        """Turn a ready standby into this worker; return the standby's name, or None if none is
        ready."""
        while (name := self._pool.take_ready(now_s, role)) is not None:
            process = self._children[name]
            try:
                if process.poll() is not None:
                    raise ProcessLookupError("it has ended")
                give_order(self._run_dir, name, StandbyOrder(process.pid, str(role), worker))
            except OSError as error:
                log.warning("standby_not_used", standby=name, worker=worker, reason=str(error))
                process.kill()
                continue
            self._processes.hand_over(name, role, worker)
            self._orders[name] = worker, now_s
            return name
        return None

    def replace_all(self, reason: str) -> None:
        """Replace all standbys by new ones, and use none of the present ones."""
        self._pool.replace_all(reason)

    # -- keeping -----------------------------------------------------------------------------------

    def reconcile(
        self, now_s: float, beats: Sequence[Worker], workers: Mapping[str, Role], *, is_over: bool
    ) -> list[Intervention]:
        """Read the reports. Return the starts of missing standbys, and the kills of those that are no
        longer useful and of those that did not become workers, which are then restarted as usual.

        Args:
            now_s: The supervisor's monotonic time.
            beats: All heartbeats.
            workers: Wanted workers of this host, by name.
            is_over: Whether the fleet stops, which ends all standbys."""
        if not any(self._roles.values()):
            return []
        self._began_s = now_s if self._began_s is None else self._began_s
        self._measure(now_s, beats)
        self._read(now_s)
        wanted = self._check_orders(now_s)
        versions = [beat.policy_version for beat in beats if beat.who.role is Role.LEARNER]
        if is_over:
            self._pool.want({})
        elif self._is_held_up(now_s, beats, workers):
            self._pool.want(self._pool.present)
        else:
            self._pool.want(self._that_fit(self._wanted(now_s, workers)))
        for action in self._pool.tick(now_s, max(versions, default=None)):
            if action.verb is Verb.KILL:
                log.info("standby_ended", standby=action.worker, reason=action.reason)
            # the record of repairs is about workers
            wanted.append(replace(action, reason=""))
        for kind, reason in self._pool.given_up.items():
            self._say(kind, "given up", f"no standby is started any more: {reason}")
        return wanted

    def start(self, now_s: float, name: str) -> None:
        """Start a wanted standby's process."""
        standby = self._pool.find(name)
        assert standby is not None, "only standbys of the pool are started"
        roles = self._roles[standby.kind]
        try:
            if not self._is_clear:
                clear_standbys(self._run_dir)
                self._is_clear = True
            process = self._processes.begin_standby(name, standby_command(self._run_dir, name, roles), roles)
        except OSError as error:
            log.warning("standby_lost", standby=name, reason=str(error))
            self._pool.ended(now_s, name, str(error))
        else:
            log.info("standby_started", standby=name, pid=process.pid, roles=[str(role) for role in roles])

    def _measure(self, now_s: float, beats: Sequence[Worker]) -> None:
        pids = self._processes.pids
        for beat in beats:
            worker = beat.who.worker
            if worker in self._starts and pids.get(worker) == beat.pid and beat.waiting_for is not WaitingFor.STARTING:
                role, started_s = self._starts.pop(worker)
                self._loads[role] = min(now_s - started_s, self._loads.get(role, now_s - started_s))

    def _read(self, now_s: float) -> None:
        for name, code in self._processes.reap_standbys().items():
            remove_report(self._run_dir, name)
            standby, words = self._pool.find(name), f"it ended with code {code}; see logs/{name}.out"
            if standby is not None and standby.phase is not StandbyPhase.ENDING:
                log.warning("standby_lost", standby=name, reason=words)
            self._pool.ended(now_s, name, words)
        for name, process in self._children.items():
            standby, report = self._pool.find(name), read_report(self._run_dir, name)
            if standby and report and report.pid == process.pid and report.turn != standby.turn:
                self._read_report(now_s, standby, report)

    def _read_report(self, now_s: float, standby: Standby, report: StandbyReport) -> None:
        standby.turn, standby.memory_bytes = report.turn, report.memory_bytes
        name, roles = standby.name, frozenset(map(Role, report.roles))
        if Role.GENERATOR in roles and report.version is None and self._follows:
            # not usable before it has weights
            roles = frozenset[Role]()
        version, progress, is_taking = report.version, report.progress, report.is_taking
        if self._pool.reported(now_s, name, roles, version, progress=progress, is_taking=is_taking):
            log.info("standby_ready", standby=name, prepared_s=report.prepared_s, memory_bytes=report.memory_bytes)
        if standby.phase is StandbyPhase.READY:
            self._bytes[standby.kind] = report.memory_bytes

    @property
    def _follows(self) -> bool:
        """Whether generic standbys load published versions, which must be complete ones in files of
        this host."""
        config = self._config
        is_near = str(Role.LEARNER) not in config.launch.launched and config.weights.path != "wire"
        return is_near and not config.learner.lora.rank

    def _check_orders(self, now_s: float) -> list[Intervention]:
        disobeyed = list[Intervention]()
        for name, (worker, at_s) in list(self._orders.items()):
            is_open = order_path(self._run_dir, name).exists()
            if is_open and now_s - at_s <= _OBEYED_S:
                continue
            remove_report(self._run_dir, name)
            del self._orders[name]
            if is_open:
                why = f"{name} did not carry out its order to become it"
                disobeyed.append(Intervention(worker, Verb.KILL, why))
        return disobeyed

    # -- how many ----------------------------------------------------------------------------------

    def _is_held_up(self, now_s: float, beats: Sequence[Worker], workers: Mapping[str, Role]) -> bool:
        """Return whether a wanted worker is starting, which a standby's start would slow down. A
        worker that is away for longer than its start takes does not count."""
        at_work = {beat.who.worker for beat in beats if beat.waiting_for is not WaitingFor.STARTING}
        self._away = {worker: self._away.get(worker, now_s) for worker in workers.keys() - at_work}
        return any(now_s - since_s <= self._longest_start_s(workers[worker]) for worker, since_s in self._away.items())

    def _longest_start_s(self, role: Role) -> float:
        """Return how long a worker of this role should take to start."""
        limit_s, load_s = self._config.supervisor.start_timeout_s, self._loads.get(role)
        return limit_s if load_s is None else min(limit_s, _TIMES_LOAD * load_s + _LOAD_SLACK_S)

    def _wanted(self, now_s: float, workers: Mapping[str, Role]) -> dict[StandbyKind, int]:
        """Return how many standbys of each kind would be useful, regardless of memory."""
        fleet, wanted = self._config.fleet, dict[StandbyKind, int]()
        roles = self._roles[StandbyKind.GENERIC]
        if fleet.standby != "auto":
            wanted[StandbyKind.GENERIC] = fleet.standby if roles else 0
        elif self._is_worth(roles):
            num = sum(role in roles for role in workers.values())
            run_s = 0.0 if self._began_s is None else now_s - self._began_s
            rate = measured_rate(self._config.recovery.faults_per_day, self._num_repairs, num, run_s)
            refill_s = self._pool.refill_s(StandbyKind.GENERIC) or _FIRST_REFILL_S
            wanted[StandbyKind.GENERIC] = max(1, num_standbys(num, rate, refill_s))
        learner, is_auto = self._roles[StandbyKind.LEARNER], fleet.standby_learner == "auto"
        if fleet.standby_learner == "on" or (is_auto and self._is_worth(learner)):
            wanted[StandbyKind.LEARNER] = len(learner)
        return wanted

    def _is_worth(self, roles: Sequence[Role]) -> bool:
        """Return whether some role starts slowly enough. Never on a host with GPUs, whose memory is
        not known here."""
        is_slow = any(self._loads.get(role, 0.0) >= WORTH_S for role in roles)
        return is_slow and not any(Path("/dev").glob(_GPUS))

    def _that_fit(self, wanted: Mapping[StandbyKind, int]) -> dict[StandbyKind, int]:
        """Limit the wanted standbys to those that exist or fit into memory; one of each kind comes
        before a second one. Each new shortage is logged once."""
        present = self._pool.present
        given = {kind: min(number, present[kind]) for kind, number in wanted.items()}
        open_kinds = [kind for kind in wanted if kind not in self._pool.given_up]
        free = self._free() - self._still_to_take() if given != wanted else 0
        while lacking := [kind for kind in open_kinds if given[kind] < wanted[kind]]:
            kind = min(lacking, key=given.__getitem__)
            need = self._need(kind)
            if need <= free:
                given[kind], free = given[kind] + 1, free - need
                continue
            open_kinds.remove(kind)
            number = f"{given[kind]} of {wanted[kind]} standbys are kept"
            self._say(kind, number, f"{number}: one more takes {need >> 20} MiB, and {max(0, free) >> 20} MiB are free")
        for kind in open_kinds:
            self._said.pop(kind, None)
        return given

    def _need(self, kind: StandbyKind) -> int:
        return self._bytes.get(kind) or standby_bytes(self._config, self._roles[kind])

    def _still_to_take(self) -> int:
        """Return the memory that starting standbys will still take."""
        starting = [one for one in self._pool.standbys if one.phase is StandbyPhase.STARTING]
        return sum(max(0, self._need(one.kind) - one.memory_bytes) for one in starting)

    def _say(self, kind: StandbyKind, what: str, words: str) -> None:
        """Log a shortage unless it was the last one logged for this kind."""
        if self._said.get(kind) != what:
            self._said[kind] = what
            log.warning("fewer_standbys", kind=str(kind), reason=words)
