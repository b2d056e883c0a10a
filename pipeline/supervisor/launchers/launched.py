"""Runs a launcher for the supervisor's loop, which must not block on slow calls.

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
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

import structlog

from pipeline.fleet.state import Worker
from pipeline.process.exit_codes import ExitCode, last_error, printed_error
from pipeline.supervisor.launchers.seam import Exit, Job, JobState, Launcher, LaunchFailed
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


class Launched:
    """Jobs that this supervisor started or adopted, by worker."""

    def __init__(self, launcher: Launcher, poll_s: float) -> None:
        self._launcher, self._poll_s = launcher, poll_s
        self._orders: dict[str, Order] = {}
        self._held: dict[str, _Held] = {}
        self._ended: list[Exit] = []
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._is_closing = False
        self._trouble = ""
        self._thread = threading.Thread(target=self._work, name="launcher", daemon=True)

    def adopt(self) -> dict[str, Role]:
        """Adopt earlier supervisors' jobs that have not ended; return their roles by worker. Raises
        LaunchFailed."""
        found = {worker: job for worker, job in self._launcher.listing().items() if job.state is not JobState.ENDED}
        with self._lock:
            self._held |= {worker: _Held(job.role, job, is_started=True) for worker, job in found.items()}
        self._begin()
        return {worker: job.role for worker, job in found.items()}

    def start(self, role: Role, worker: str) -> None:
        """Order a start. If it fails, ``reap`` reports a failure."""
        with self._lock:
            self._held[worker] = _Held(role)
            self._orders[worker] = Order.START
        self._begin()

    def stop(self, worker: str, *, now: bool = False) -> None:
        """Order a drain, or with ``now`` a kill. A worker that has not started yet is just dropped."""
        with self._lock:
            held = self._held.get(worker)
            if held is None:
                return
            if self._orders.get(worker) is Order.START:
                del self._orders[worker], self._held[worker]
                self._ended.append(Exit(worker, held.role, 0, ExitCode.OK))
                return
            self._orders[worker] = Order.END if now else Order.DRAIN
        self._begin()

    def running(self) -> list[str]:
        """Return the workers whose job is running rather than waiting in a queue."""
        with self._lock:
            return [name for name, held in self._held.items() if held.job and held.job.state is JobState.RUNNING]

    def pids(self, beats: Iterable[Worker]) -> dict[str, int]:
        """Return running workers' process ids from their heartbeats; 0 before the first one."""
        running = dict.fromkeys(self.running(), 0)
        return running | {beat.who.worker: beat.pid for beat in beats if beat.who.worker in running}

    def listing(self) -> dict[str, Job]:
        with self._lock:
            return {name: held.job for name, held in self._held.items() if held.job is not None}

    def reap(self) -> list[Exit]:
        with self._lock:
            ended, self._ended = self._ended, []
        return ended

    def logs(self, worker: str) -> str:
        try:
            return self._launcher.logs(worker)
        except LaunchFailed as error:
            return str(error)

    def end_all(self) -> None:
        for worker in list(self._held):
            self.stop(worker, now=True)

    def close(self) -> None:
        """Kill all workers, and wait up to 30 s until those orders are carried out."""
        self.end_all()
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

    # -- the thread --------------------------------------------------------------------------------

    def _begin(self) -> None:
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
            error = printed_error(self.logs(worker)) if code > 0 else None
            self._report(held, Exit(worker, held.role, 0, code, error))

    def _report(self, held: _Held, ended: Exit) -> None:
        with self._lock:
            if self._held.get(ended.worker) is held:
                del self._held[ended.worker]
                self._orders.pop(ended.worker, None)
                self._ended.append(ended)

    def _tell(self, trouble: str) -> None:
        if trouble and not self._trouble:
            log.warning("place_does_not_answer", reason=trouble, action="its workers are left alone; it is asked again")
        elif self._trouble and not trouble:
            log.info("place_answers_again")
        self._trouble = trouble
