"""The workers of one host: what is decided about them, and the executor that carries it out.

A run's supervisor has one, and so has each joined host."""

from __future__ import annotations

import asyncio
import signal
import socket
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path

import structlog

from pipeline.config.schema import RunConfig
from pipeline.fleet.limits import limits_of
from pipeline.fleet.repair.escalation import Escalation
from pipeline.fleet.state import Worker
from pipeline.process.descendants import activity_of
from pipeline.process.exit_codes import ExitCode, LastError
from pipeline.process.records import process_runs
from pipeline.process.stacks.request import stands_of
from pipeline.runtime.registry.contract import Drain, Registry
from pipeline.supervisor.executor import Executor
from pipeline.supervisor.fleet_plan import FleetPlan, Intervention, Verb, worker_name
from pipeline.supervisor.launchers.seam import Exit
from pipeline.supervisor.memory_kills import MemoryKills
from pipeline.supervisor.processes import Command, Processes
from pipeline.supervisor.repair_watch import RepairWatch
from pipeline.supervisor.standbys import StandbyKeeper
from pipeline.supervisor.watchdog import Watchdog
from pipeline.training.checkpoints import CHECKPOINTS, VALUE_CHECKPOINTS, newest_name
from protocol.ids import Role

_STACKS_S = 1.5
"""How long reading the stacks of stuck workers may delay their end."""
ENDED_WELL = frozenset({ExitCode.OK, ExitCode.STARVED})
CLEAN_EXITS = ENDED_WELL | {ExitCode.FENCED}

log = structlog.get_logger(__name__)


class HostFleet:
    """The plan, the processes and the watchdog of one host's workers."""

    def __init__(
        self,
        config: RunConfig,
        run_dir: Path,
        command: Command,
        name: Callable[[Role, int], str] = worker_name,
        processes: Processes | None = None,
        escalation: Escalation | None = None,
        standbys: bool = False,
    ) -> None:
        """``name``: maps role and number to a worker's name. ``processes``: replaces the processes
        of this host. ``escalation``: told of losses and starts, and decides evictions.
        ``standbys``: whether standbys replace lost workers."""
        self._run_dir = run_dir
        self.processes = processes or Processes(run_dir, command)
        self._escalation = escalation
        self.standbys = StandbyKeeper(config, run_dir, self.processes) if standbys else None
        self.plan = FleetPlan(config.supervisor, name, None if escalation is None else self._evicts)
        self._limits = limits_of(config)
        self.watchdog = Watchdog(self._limits)
        self._memory = MemoryKills()
        self.executor = Executor(run_dir, self.processes, self._start)
        self._repairs = RepairWatch()
        self.blames_code: Callable[[Exit, str], bool] = lambda *_: False
        """Returns whether a version of code on trial is to blame for a failed exit. The text says
        how the worker hung, if it was killed for that."""
        self._of_code: dict[str, int] = {}
        """Process ids of workers killed because a version of code made them hang, by name."""
        self._expelled: dict[str, int] = {}
        """Process ids of evicted workers that were killed, by name."""
        self._unfenced: dict[str, int] = {}
        """Process ids of workers that failed and are not fenced yet."""

    def _evicts(self, worker: str, role: Role, reason: str, is_its_own: bool) -> bool:
        now_s = time.monotonic()
        return self._escalation is not None and self._escalation.exhausted(
            now_s, worker, role, reason, is_its_own=is_its_own
        )

    def reset_timers(self, now_s: float) -> None:
        """Restart all time limits, because heartbeats could not be read."""
        self.watchdog.reset_timers(now_s)
        if self._escalation is not None:
            self._escalation.reset_timers(now_s)

    def to_replace(
        self,
        worker: str,
        reason: str,
        *,
        stood_s: float = 0.0,
        localise_s: float = 0.0,
        stands: Sequence[str] = (),
        kept: str | None = None,
        has_case: bool = False,
    ) -> Intervention:
        """Return the intervention by which a worker starts again. Any but this host's is only
        fenced, and ends because of it.

        Args:
            worker: Its name.
            reason: Why, in words.
            stood_s: Time since its last progress, or since the fault began.
            localise_s: The part of it after the first symptom.
            stands: Where it hangs (``stands``).
            kept: As in ``FleetPlan.replace``.
            has_case: Whether a repair case has the reason."""
        role = self.plan.role_of(worker)
        if worker not in self.processes.pids or role is None:
            return Intervention(worker, Verb.FENCE, role=role)
        self._repairs.lost(worker, role, reason, time.monotonic(), stood_s=stood_s, localise_s=localise_s)
        # before the fence, which may end the worker before it is killed
        is_news = self.plan.replace(worker, reason, kept=kept)
        return Intervention(worker, Verb.REPLACE, reason if is_news else "", role, tuple(stands), has_case)

    async def stands(self, workers: Collection[str]) -> dict[str, tuple[str, ...]]:
        """Describe where workers of this host hang; all are examined at once."""
        here = [worker for worker in workers if worker in self.processes.pids]
        return await asyncio.to_thread(stands_of, self._run_dir, here, answer_s=_STACKS_S) if here else {}

    async def expel(self, registry: Registry, evicted: Mapping[str, str]) -> None:
        """End running workers that are evicted, by name with why. ``follow`` does not start them
        again."""
        pids = self.processes.pids
        self._expelled = {worker: pid for worker, pid in self._expelled.items() if pids.get(worker) == pid}
        for worker in pids.keys() & evicted.keys() - self._expelled.keys():
            reason = f"{evicted[worker]}; `headrace fleet readmit` takes it back"
            one = Intervention(worker, Verb.EXPEL, reason, self.plan.role_of(worker))
            await self.executor.carry_out(registry, [one])
            self._expelled[worker] = pids[worker]
            self._repairs.left(worker)

    def follow(
        self,
        counts: Mapping[Role, int],
        drains: Iterable[Drain],
        beats: Sequence[Worker],
        now: float,
        left_out: Collection[str],
    ) -> None:
        """Carry out the desired fleet. ``left_out``: excluded names."""
        there = self.incarnations(beats)
        for drain in drains:
            if drain.is_replaced and there.get(drain.worker, drain.epoch + 1) <= drain.epoch:
                self.executor.act(self.plan.renew(drain.worker, now, "an operator drains it"))
        self.executor.act(self.plan.want(counts, now, left_out))

    def own(self, beats: Sequence[Worker]) -> dict[str, Worker]:
        """Return the heartbeats of the processes held here, by worker."""
        pids = self.processes.pids
        return {beat.who.worker: beat for beat in beats if pids.get(beat.who.worker) == beat.pid}

    def incarnations(self, beats: Sequence[Worker]) -> dict[str, int]:
        return {worker: beat.who.epoch for worker, beat in self.own(beats).items()}

    def go_by(self, code: Path | None) -> None:
        """Start workers and standbys from the Headrace in this folder; None: the installed one."""
        if self.processes.go_by(code) and self.standbys is not None:
            self.standbys.replace_all("it runs other code than the workers")

    def _start(self, one: Intervention) -> None:
        """Start a standby, or a worker: by a standby if it was lost and one is ready, else as a process."""
        worker, role, now, standby = one.worker, one.role, time.monotonic(), None
        if role is None:
            if self.standbys is not None:
                self.standbys.start(now, worker)
            return
        if self.standbys is not None:
            if self._repairs.is_open(worker) and self.processes.is_here(role):
                standby = self.standbys.take_over(now, role, worker)
            if standby is None:
                self.standbys.started(now, worker, role)
        if standby is None:
            self.processes.start(role, worker)
        # registering the successor fences the old incarnation
        self._unfenced.pop(worker, None)
        self._repairs.started(worker, now, standby or "")
        if self._escalation is not None:
            self._escalation.started(now, worker, standby or "")

    def record_exit(self, exit_: Exit, now: float) -> int:
        """Record an exit in the plan; return its exit code as it counts."""
        was_draining = self.plan.is_draining(exit_.worker)
        if exit_.code not in CLEAN_EXITS:
            self._unfenced[exit_.worker] = exit_.pid
        # a worker's main loop handles SIGTERM; one that dies of it held no work yet
        code = ExitCode.OK if was_draining and exit_.code == -signal.SIGTERM else exit_.code
        is_asked_for = was_draining or self.plan.is_being_replaced(exit_.worker)
        of_memory = "" if is_asked_for else self._memory.explain(exit_.worker, exit_.role, exit_.pid, code)
        how = of_memory or meaning(code)
        # a worker replaced on purpose may also end cleanly, by its fence
        is_loss = code not in CLEAN_EXITS or self.plan.is_being_replaced(exit_.worker)
        if was_draining or not is_loss:
            self._repairs.left(exit_.worker)
        else:
            self._repairs.lost(exit_.worker, exit_.role, how, now)
        stood = self._of_code.pop(exit_.worker, None) == exit_.pid
        is_of_code = stood or (not was_draining and code not in CLEAN_EXITS and self.blames_code(exit_, ""))
        if self._escalation is not None and not was_draining and code not in ENDED_WELL and not is_of_code:
            self._escalation.lost(now, exit_.worker, exit_.role, how)
        kept = self._kept(exit_.worker)
        error = LastError("OutOfMemory", of_memory, may_pass=True) if of_memory else exit_.error
        counted, error = (ExitCode.FAILURE, None) if is_of_code else (code, error)
        self.plan.exited(exit_.worker, counted, now, error=error, delivered=exit_.delivered, kept=kept)
        if self.standbys is not None and exit_.role in self.standbys.roles and not is_of_code:
            self.plan.hasten(exit_.worker, now)
        if code not in (ExitCode.OK, ExitCode.STARVED):
            words = {} if exit_.error is None else {"error": str(exit_.error)}
            log.warning("worker_exited", worker=exit_.worker, exit_code=code, meaning=how, **words)
        while self.plan.given_up:
            lost = self.plan.given_up.pop()
            log.error("worker_given_up", worker=lost.worker, reason=lost.reason, action="the run goes on without it")
        return code

    async def fence_exited(self, registry: Registry, beats: Sequence[Worker]) -> None:
        """Fence workers that failed, so that their heartbeats and mailboxes leave the registry.
        What the ledger did not answer is repeated at the next call."""
        # process id 0: a job elsewhere whose id was never known
        beating = {(beat.who.worker, pid) for beat in beats for pid in (beat.pid, 0)}
        for worker, pid in list(self._unfenced.items()):
            if (worker, pid) in beating:
                await self.executor.carry_out(registry, [Intervention(worker, Verb.FENCE)])
            del self._unfenced[worker]

    async def fence_departed(self, registry: Registry, beats: Sequence[Worker]) -> None:
        """Fence silent workers that this supervisor does not hold."""
        gone = {beat.pid for beat in beats if beat.host == socket.gethostname() and not process_runs(beat.pid)}
        silent = self.watchdog.departed(beats, self.processes.pids, gone)
        wanted = [Intervention(worker, Verb.FENCE, reason) for worker, reason in silent.items()]
        await self.executor.carry_out(registry, wanted)

    async def replace(self, registry: Registry, beats: Sequence[Worker], now: float) -> None:
        """Fence and kill frozen and stuck workers, which start again."""
        self.processes.observe(beats)
        self._memory.observe(beats, self.processes.pids)
        roles, own = {beat.who.worker: beat.who.role for beat in beats}, self.own(beats)
        pids = self.processes.pids
        here = {
            worker for worker in self.watchdog.quiet(now) if worker in roles and self.processes.is_here(roles[worker])
        }
        activity = {worker: activity_of(pids[worker]) for worker in here & pids.keys()}
        dead = self.watchdog.evaluate(beats, pids, now, activity)
        # frozen processes cannot answer
        silent = {worker for worker in dead if self.watchdog.is_silent(worker)}
        stands = await self.stands(dead.keys() - silent)
        for worker, reason in dead.items():
            # a worker whose heartbeat stopped was probably frozen from outside
            is_of_code = not (worker in silent and worker in own) and self._stands_by_code(worker, pids[worker], reason)
            if self._escalation is not None and worker in roles and not is_of_code:
                self._escalation.lost(now, worker, roles[worker], reason)
            stood_s = own[worker].unmoved_s + own[worker].silent_s if worker in own else 0.0
            kept = None if worker in silent or is_of_code else self._kept(worker)
            one = self.to_replace(worker, reason, stood_s=stood_s, stands=stands.get(worker, ()), kept=kept)
            await self.executor.carry_out(registry, [one])
        pids = self.processes.pids
        for beat in beats:
            worker = beat.who.worker
            if pids.get(worker) == beat.pid:
                limit_s = self._limits.drain_limit_s(beat.waiting_for, beat.work.slowest_s)
                self.plan.moved(worker, now - beat.unmoved_s - beat.silent_s, limit_s)
        repaired = self._repairs.observe(beats, pids, now, time.time())
        for row in repaired:
            by = {"standby": row.standby} if row.standby else {}
            log.info("worker_repaired", worker=row.worker, took_s=round(row.whole_s, 3), cause=row.cause, **by)
            if self.standbys is not None:
                self.standbys.repaired(Role(row.role))
        await self.executor.record(repairs=repaired)
        if self.standbys is not None:
            is_over = self.plan.is_stopping or self.plan.failure is not None
            wanted = self.plan.wanted
            self.executor.act(await asyncio.to_thread(self.standbys.reconcile, now, beats, wanted, is_over=is_over))

    def _stands_by_code(self, worker: str, pid: int, reason: str) -> bool:
        """Return whether a version of code on trial is to blame that a worker hangs."""
        role = self.plan.role_of(worker)
        if role is None or self.plan.is_draining(worker):
            return False
        if self._of_code.get(worker) != pid and self.blames_code(Exit(worker, role, pid, ExitCode.STUCK), reason):
            self._of_code[worker] = pid
        return self._of_code.get(worker) == pid

    def _kept(self, worker: str) -> str | None:
        """Return the newest checkpoint of a learner or value worker, "" for none; None for other
        roles."""
        folders = {str(Role.LEARNER): CHECKPOINTS, str(Role.VALUE): VALUE_CHECKPOINTS}
        return newest_name(self._run_dir / folders[worker]) if worker in folders else None


def meaning(exit_code: int) -> str:
    if exit_code < 0:
        return f"killed by {signal.Signals(-exit_code).name}"
    values = {int(code): code.name.lower().replace("_", " ") for code in ExitCode}
    return values.get(exit_code, "unknown")
