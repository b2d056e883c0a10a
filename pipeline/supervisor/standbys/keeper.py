"""Keeps the standbys of a run's host: how many there are, their processes, and which worker each
becomes.

The supervisor calls it twice a second with heartbeats; it reads the standbys' reports, wants standbys
started and killed (``executor``), and orders them to become workers. Standbys only serve this host:
roles that a launcher starts, and joined hosts, have none."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
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
from pipeline.supervisor.standbys.pool import (
    Standby,
    StandbyKind,
    StandbyPhase,
    StandbyPool,
    measured_rate,
    num_standbys,
    standby_bytes,
)
from protocol import headrace
from protocol.ids import Role

WORTH_S: Final = 10.0
"""A start must take at least this long to justify a standby."""
GENERIC_ROLES: Final = (Role.GENERATOR, Role.REWARD, Role.REFERENCE, Role.VALUE)
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
