"""The processes of one supervisor, plus its launcher's jobs, for the roles that ``launch.roles`` names.

The supervisor's loop must not block on slow calls of a launcher.

*Consumes* starts and stops. *Produces* the jobs' states and exits. A thread carries out orders and
lists the jobs every ``launch.poll_s``; only that thread *waits for* the launcher's programs, each
with a deadline.

A worker has at most one pending order; a newer one replaces it. A failed start counts as an
infrastructure failure, so the restart budget limits retries. A failed stop is retried at the next
poll."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import structlog

from pipeline.fleet.state import Worker
from pipeline.process.exit_codes import ExitCode, last_error, printed_error
from pipeline.supervisor.launchers.seam import Exit, Job, JobState, Launcher, LaunchFailed
from pipeline.supervisor.processes import Command, Processes
from protocol.errors import ConfigError
from protocol.ids import Role

_LOST = -signal.SIGKILL
"""Exit code of a worker whose job disappeared: as if killed, which may pass."""
_CLOSE_S = 30.0

log = structlog.get_logger(__name__)


class Order(StrEnum):
    START = "start"
    DRAIN = "drain"
    END = "end"


@dataclass(slots=True)
class _Held:
    role: Role
    job: Job | None = None
    """As last listed; None before its start was carried out."""
    is_started: bool = False


class FleetProcesses(Processes):
    def __init__(
        self, run_dir: Path, command: Command, launcher: Launcher, roles: frozenset[str], *, poll_s: float
    ) -> None:
        super().__init__(run_dir, command)
        self._launcher, self._roles, self._poll_s = launcher, roles, poll_s
        self._beats: Sequence[Worker] = ()
        self._orders: dict[str, Order] = {}
        self._held: dict[str, _Held] = {}
        self._exits: list[Exit] = []
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._is_closing = False
        self._trouble = ""
        self._thread = threading.Thread(target=self._work, name="launcher", daemon=True)

    @property
    def pids(self) -> dict[str, int]:
        """Process ids by worker; 0 for a running job that has no heartbeat yet."""
        running = dict.fromkeys(self.running(), 0)
        return super().pids | running | {one.who.worker: one.pid for one in self._beats if one.who.worker in running}

    def observe(self, beats: Sequence[Worker]) -> None:
        self._beats = beats

    def is_here(self, role: Role) -> bool:
        return role not in self._roles

    def adopt_jobs(self) -> dict[str, Role]:
        """Adopt earlier supervisors' jobs that have not ended; return their roles by worker. Raises
        LaunchFailed."""
        found = {worker: job for worker, job in self._launcher.listing().items() if job.state is not JobState.ENDED}
        with self._lock:
            self._held |= {worker: _Held(job.role, job, is_started=True) for worker, job in found.items()}
        self._wake_thread()
        return {worker: job.role for worker, job in found.items()}

    def start(self, role: Role, name: str) -> None:
        """Start a process, or order a job's start. If it fails, ``reap`` reports a failure."""
        if self.is_here(role):
            super().start(role, name)
            return
        with self._lock:
            self._held[name] = _Held(role)
            self._orders[name] = Order.START
        self._wake_thread()

    def stop(self, name: str, *, now: bool = False) -> None:
        """Stop a process, or order a job's drain, or with ``now`` its kill. A job that has not started
        yet is just dropped."""
        super().stop(name, now=now)
        self._order_stop(name, now=now)

    def _order_stop(self, worker: str, *, now: bool) -> None:
        with self._lock:
            held = self._held.get(worker)
            if held is None:
                return
            if self._orders.get(worker) is Order.START:
                del self._orders[worker], self._held[worker]
                self._exits.append(Exit(worker, held.role, 0, ExitCode.OK))
                return
            self._orders[worker] = Order.END if now else Order.DRAIN
        self._wake_thread()

    def running(self) -> list[str]:
        """Return the workers whose job is running rather than waiting in a queue."""
        with self._lock:
            return [name for name, held in self._held.items() if held.job and held.job.state is JobState.RUNNING]

    def listing(self) -> dict[str, Job]:
        with self._lock:
            return super().listing() | {name: held.job for name, held in self._held.items() if held.job is not None}

    def reap(self) -> list[Exit]:
        with self._lock:
            ended, self._exits = self._exits, []
        return [*super().reap(), *ended]

    def logs(self, worker: str) -> str:
        return super().logs(worker) or self._printed(worker)

    def _printed(self, worker: str) -> str:
        try:
            return self._launcher.logs(worker)
        except LaunchFailed as error:
            return str(error)

    def kill_all(self) -> None:
        for worker in list(self._held):
            self._order_stop(worker, now=True)
        super().kill_all()

    def close(self) -> None:
        """Kill all workers, and wait up to 30 s until the orders for jobs are carried out."""
        self.kill_all()
        deadline = time.monotonic() + _CLOSE_S
        while self._orders and self._thread.is_alive() and time.monotonic() < deadline:
            self._wake.set()
            time.sleep(0.05)
        self._is_closing = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(_CLOSE_S)
        if self._orders:
            log.error(
                "jobs_not_ended", workers=sorted(self._orders), reason=self._trouble, do="end them where they run"
            )
        super().close()

    # -- the thread --------------------------------------------------------------------------------

    def _wake_thread(self) -> None:
        if self._thread.ident is None:
            self._thread.start()
        self._wake.set()

    def _work(self) -> None:
        while not self._is_closing:
            self._wake.clear()
            try:
                self._carry_out_all()
                self._look()
            except LaunchFailed as error:
                self._tell(str(error))
            else:
                self._tell("")
            self._wake.wait(self._poll_s)

    def _carry_out_all(self) -> None:
        with self._lock:
            orders = dict(self._orders)
        for worker, order in orders.items():
            with self._lock:
                # skip an order that was replaced; from here on a start cannot be withdrawn
                if self._orders.get(worker) is not order:
                    continue
                del self._orders[worker]
                held = self._held.get(worker)
            if held is None:
                continue
            try:
                if order is Order.START:
                    self._launcher.start(held.role, worker)
                    held.is_started = True
                    log.info("job_started", worker=worker)
                else:
                    self._launcher.stop(worker, now=order is Order.END)
            # ConfigError: a token or a template is gone since
            except (LaunchFailed, ConfigError) as error:
                if order is not Order.START:
                    with self._lock:
                        self._orders.setdefault(worker, order)
                    raise
                log.error("job_not_started", worker=worker, reason=str(error))
                self._report(held, Exit(worker, held.role, 0, ExitCode.HOST_FAILED, last_error(error)))

    def _look(self) -> None:
        with self._lock:
            started = {worker: held for worker, held in self._held.items() if held.is_started}
        if not started:
            return
        jobs = self._launcher.listing()
        for worker, held in started.items():
            job = jobs.get(worker)
            if job is not None and job.state is not JobState.ENDED:
                if held.job is None or held.job.state is not job.state:
                    log.info("job", worker=worker, state=job.state, place=job.place, reason=job.reason)
                held.job = job
                continue
            reason = "its place does not list it any more" if job is None else job.reason
            log.info("job", worker=worker, state=JobState.ENDED, reason=reason)
            code = _LOST if job is None or job.exit_code is None else job.exit_code
            error = printed_error(self._printed(worker)) if code > 0 else None
            self._report(held, Exit(worker, held.role, 0, code, error))

    def _report(self, held: _Held, ended: Exit) -> None:
        with self._lock:
            if self._held.get(ended.worker) is held:
                del self._held[ended.worker]
                self._orders.pop(ended.worker, None)
                self._exits.append(ended)

    def _tell(self, trouble: str) -> None:
        if trouble and not self._trouble:
            log.warning("place_does_not_answer", reason=trouble, action="its workers are left alone; it is asked again")
        elif self._trouble and not trouble:
            log.info("place_answers_again")
        self._trouble = trouble
