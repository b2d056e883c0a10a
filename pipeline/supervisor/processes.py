"""Starts, adopts, stops and reaps worker processes on this host.

*Consumes* commands. *Produces* processes in their own sessions, so that a terminal's Ctrl-C reaches
only the supervisor; ``<run_dir>/logs/<worker>.out``; a record of each process for a later
supervisor. *Waits for* exits only in ``close`` and ``end``: otherwise they are polled. A worker's
descendants are killed with it, including those it started as a standby. No worker's environment
holds the ledger's password.

``launched`` adds the jobs of a launcher. The plan, restart budgets, fences and watchdog are
the same for both."""

from __future__ import annotations

import secrets
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO

import structlog

from pipeline.files import cut, last_lines, tail
from pipeline.fleet.state import Worker
from pipeline.process import records
from pipeline.process.descendants import WORKER_MARK, end_marked, worker_mark
from pipeline.process.exit_codes import ExitCode, printed_error
from pipeline.supervisor.launchers.seam import Exit, Job, JobState
from pipeline.supervisor.starter import NAME as STARTER
from pipeline.supervisor.starter import AdoptedProcess, EarlyProcesses, Starter, StarterEnded, marked_environment
from protocol import headrace
from protocol.ids import Role

Command = Callable[[Role, Path, str], list[str]]
"""Maps role, run folder and worker name to a command line."""

StandbyChild = subprocess.Popen[bytes] | AdoptedProcess
"""A process that is not a worker yet."""

_GPUS = "CUDA_VISIBLE_DEVICES"

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Found:
    """A running worker process that an earlier supervisor started."""

    worker: str
    role: Role
    identity: records.ProcessIdentity
    epoch: int
    """0 before its registration."""
    former_mark: str = ""
    """Mark of the processes that it started as a standby."""

    @property
    def pid(self) -> int:
        return self.identity.pid


@dataclass(frozen=True, slots=True)
class _Child:
    role: Role
    process: subprocess.Popen[bytes] | AdoptedProcess
    identity: records.ProcessIdentity | None
    output_from: int
    """Offset in its output file where this process's output begins."""
    former_mark: str = ""


def worker_command(role: Role, run_dir: Path, name: str) -> list[str]:
    return headrace.command("workers", str(role), "--run-dir", str(run_dir), "--name", name)


def visible_gpus(gpus: Sequence[int], seen: str | None) -> str:
    """Return what a worker sees: some of what this process sees, None for all. Raises OSError if it sees too few."""
    if not seen:
        return ",".join(map(str, gpus))
    names = seen.split(",")
    if max(gpus) >= len(names):
        raise OSError(f"GPU {max(gpus)} of fleet.gpus is not there: {_GPUS} is {seen}, which are {len(names)}")
    return ",".join(names[gpu] for gpu in gpus)


class Processes:
    def __init__(self, run_dir: Path, command: Command = worker_command) -> None:
        self._run_dir = run_dir
        self._command = command
        self._starters: dict[Path | None, Starter] = {}
        """By the folder of the Headrace that their forks run; None for the installed one."""
        self._starter_command: Sequence[str] = ()
        self._code: Path | None = None
        self._forks: Callable[[Role], bool] = lambda _: False
        self._children: dict[str, _Child] = {}
        self._unstarted: list[Exit] = []
        self.standbys: dict[str, StandbyChild] = {}
        """Standby processes by name."""
        self._standby_marks: dict[str, str] = {}
        self._former: dict[str, str] = {}
        """What became of standbys: worker name by standby name."""
        self.gpus: Callable[[Role, str], Sequence[int]] = lambda *_: ()
        """Returns the GPUs that a worker sees, of those that this process sees; empty: all."""
        self.early: EarlyProcesses | None = None
        """Processes that import already; they are used for the installed code."""

    @property
    def pids(self) -> dict[str, int]:
        return {name: child.process.pid for name, child in self._children.items()}

    def prepare(
        self, command: Sequence[str], forks: Callable[[Role], bool], given_up: Callable[[], bool] = lambda: False
    ) -> None:
        """Start the starter, and wait until it can fork workers.

        Args:
            command: Command line of the starter.
            forks: Returns whether a role's workers are forked; others import for themselves.
            given_up: Ends the wait."""
        self._starter_command, self._forks = command, forks
        self._begin_starter()
        began_s = time.monotonic()
        if (starter := self._starters.get(self._code)) is not None:
            try:
                starter.wait(given_up)
                log.info("starter_ready", pid=starter.pid, seconds=round(time.monotonic() - began_s, 3))
            except (OSError, StarterEnded) as error:
                self._lose_starter(error)
        if self.early is not None and (output := self.early.starter_output()):
            with self.output_path(STARTER).open("ab") as file:
                file.write(output)

    def go_by(self, code: Path | None) -> bool:
        """Start processes from the Headrace in this folder from now on; None: the installed one.
        Returns whether that changed.

        A new starter imports it; until that is ready, workers import for themselves. Older starters
        are closed, except the installed code's and the last one used, which still report how their
        workers end."""
        if code == self._code:
            return False
        for other in [other for other in self._starters if other not in (None, code, self._code)]:
            self._starters.pop(other).close()
        self._code = code
        if self._starter_command and code not in self._starters:
            self._begin_starter()
        return True

    def _begin_starter(self) -> None:
        early = None if self._code is not None or self.early is None else self.early.take_starter()
        if early is not None:
            self._starters[None] = early
            return
        try:
            self._starters[self._code] = Starter(self._run_dir, self._of_code(self._starter_command))
        except OSError as error:
            self._lose_starter(error)

    def _of_code(self, command: Sequence[str]) -> Sequence[str]:
        return command if self._code is None else headrace.of_root(command, self._code)

    def start(self, role: Role, name: str) -> None:
        """Start a worker's process. ``reap`` reports one that cannot be started as a failure."""
        try:
            with self.output_path(name).open("ab") as output:
                output_from = output.tell()
                process = self._spawn(role, name, output)
        except OSError as error:
            log.error("worker_not_started", worker=name, reason=str(error))
            self._unstarted.append(Exit(name, role, 0, ExitCode.FAILURE))
            return
        self._children[name] = _Child(role, process, records.identify(process.pid), output_from)
        self._write_record(name, self._children[name])
        log.info("worker_started", worker=name, pid=process.pid)

    def _spawn(self, role: Role, name: str, output: BinaryIO) -> subprocess.Popen[bytes] | AdoptedProcess:
        """Fork a worker from the starter, else start a new process. Raises OSError."""
        command, mark = self._command(role, self._run_dir, name), worker_mark(self._run_dir, name)
        environment = marked_environment(mark)
        if gpus := self.gpus(role, name):
            environment[_GPUS] = visible_gpus(gpus, environment.get(_GPUS))
        return self._begin(name, environment, command, output, is_forked=self._forks(role))

    def _begin(
        self, name: str, environment: dict[str, str], command: Sequence[str], output: BinaryIO, *, is_forked: bool
    ) -> subprocess.Popen[bytes] | AdoptedProcess:
        command, starter = self._of_code(command), self._starters.get(self._code)
        if starter is not None and is_forked:
            try:
                if starter.is_ready():
                    return starter.start(command, environment, output, partial(self._written_code, name))
            except StarterEnded as error:
                self._lose_starter(error)
        if self.early is not None and self._code is None:
            early = self.early.become(name, command, environment, output)
            if early is not None:
                return early
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=environment,
        )

    def begin_standby(self, name: str, command: Sequence[str], roles: Iterable[Role]) -> StandbyChild:
        """Start a standby process and add it to ``standbys``. Raises OSError.

        Its mark is unique, because a later supervisor reuses the names of standbys."""
        mark = worker_mark(self._run_dir, f"{name}.{secrets.token_hex(4)}")
        with self.output_path(name).open("ab") as output:
            environment = marked_environment(mark)
            process = self._begin(name, environment, command, output, is_forked=all(map(self._forks, roles)))
        self.standbys[name], self._standby_marks[name] = process, mark
        return process

    def reap_standbys(self) -> dict[str, int]:
        """Return the exit codes of standbys that ended since the last call, and kill what they left
        running."""
        ended: dict[str, int] = {}
        for name, process in list(self.standbys.items()):
            if (code := process.poll()) is not None:
                del self.standbys[name]
                self._end_left(name, self._standby_marks.pop(name))
                ended[name] = code
        return ended

    def is_here(self, role: Role) -> bool:
        del role
        return True

    def hand_over(self, standby: str, role: Role, worker: str) -> None:
        process = self.standbys.pop(standby)
        self._former[standby] = worker
        mark = self._standby_marks.pop(standby)
        child = _Child(role, process, records.identify(process.pid), self._output_size(worker), mark)
        self._children[worker] = child
        self._write_record(worker, child)
        log.info("worker_started", worker=worker, pid=process.pid, standby=standby)

    def _written_code(self, name: str) -> int | None:
        name = self._former.get(name, name)
        child = self._children.get(name)
        identity = None if child is None else child.identity
        life = None if identity is None else records.read_life(self._run_dir, name, identity)
        return None if life is None else life.exit_code

    def _lose_starter(self, error: Exception) -> None:
        log.warning(
            "starter_ended", reason=str(error), action="workers import for themselves", output=f"logs/{STARTER}.out"
        )
        if (starter := self._starters.pop(self._code, None)) is not None:
            starter.close()

    def observe(self, beats: Sequence[Worker]) -> None:
        """Take in heartbeats; overridden where process ids come from them."""

    def adopt_jobs(self) -> dict[str, Role]:
        """Take over a launcher's jobs from earlier supervisors; this class has no launcher."""
        return {}

    def find(self) -> list[Found]:
        """Return recorded worker processes that run on this host and are not held here."""
        found: list[Found] = []
        for worker, record in records.read_started(self._run_dir).items():
            identity = record.identity
            if worker in self._children or records.identify(identity.pid) != identity:
                continue
            life = records.read_life(self._run_dir, worker, identity)
            found.append(Found(worker, Role(record.role), identity, life.epoch if life else 0, record.former_mark))
        return found

    def adopt(self, found: Found) -> bool:
        """Take over a process of an earlier supervisor; return False if it has just ended."""
        process = self._hold(found)
        if process is not None:
            output_from = self._output_size(found.worker)
            self._children[found.worker] = _Child(found.role, process, found.identity, output_from, found.former_mark)
        return process is not None

    def end(self, found: Found) -> None:
        if process := self._hold(found):
            process.kill()
            process.wait()
        self._ended(found.worker, found.former_mark)

    def stop(self, name: str, *, now: bool = False) -> None:
        """Ask a worker or standby to drain, or kill it with ``now``. Does nothing if it has ended."""
        child = self._children.get(name)
        if process := self.standbys.get(name) if child is None else child.process:
            process.send_signal(signal.SIGKILL if now else signal.SIGTERM)

    def listing(self) -> dict[str, Job]:
        """Return the workers held here, and those that ended since the last ``reap``."""
        host = records.this_host()
        jobs = {exit_.worker: Job(exit_.role, JobState.ENDED, host, exit_.code) for exit_ in self._unstarted}
        for name, child in self._children.items():
            code = child.process.poll()
            state = JobState.RUNNING if code is None else JobState.ENDED
            jobs[name] = Job(child.role, state, f"{host}, process {child.process.pid}", code)
        return jobs

    def reap(self) -> list[Exit]:
        """Return the processes that ended since the last call."""
        ended, self._unstarted = self._unstarted, []
        for name, child in list(self._children.items()):
            code = child.process.poll()
            if code is not None:
                del self._children[name]
                self._ended(name, child.former_mark)
                ended.append(self._exit(name, child, code))
        return ended

    def _exit(self, name: str, child: _Child, code: int) -> Exit:
        life = None if child.identity is None else records.read_life(self._run_dir, name, child.identity)
        error, delivered = (None, 0) if life is None else (life.error, life.delivered)
        if error is None and code > 0:
            error = printed_error(tail(self.output_path(name), child.output_from))
        return Exit(name, child.role, child.process.pid, code, error if code > 0 else None, delivered)

    def kill_all(self) -> None:
        """Kill all processes; ``reap`` returns them."""
        for process in (*self.standbys.values(), *(child.process for child in self._children.values())):
            process.kill()

    def close(self) -> None:
        self.kill_all()
        for name, child in self._children.items():
            child.process.wait()
            self._ended(name, child.former_mark)
        for process in self.standbys.values():
            process.wait()
        self.reap_standbys()
        self._children.clear()
        for starter in self._starters.values():
            starter.close()
        self._starters.clear()

    def end_strays(self) -> int:
        """Kill all workers of an ended run on this host with their descendants; return how many."""
        num_ended = end_marked(WORKER_MARK, worker_mark(self._run_dir))
        for worker, record in records.read_started(self._run_dir).items():
            if record.identity.host == records.this_host() and records.identify(record.identity.pid) != record.identity:
                records.forget_started(self._run_dir, worker)
        return num_ended

    def _ended(self, worker: str, former_mark: str) -> None:
        """Kill an ended worker's descendants, and remove its record."""
        self._end_left(worker, worker_mark(self._run_dir, worker), former_mark)
        records.forget_started(self._run_dir, worker)

    def _end_left(self, name: str, *marks: str) -> None:
        if left := sum(end_marked(WORKER_MARK, mark) for mark in marks if mark):
            log.warning("stray_processes_ended", worker=name, num_processes=left)

    def _hold(self, found: Found) -> AdoptedProcess | None:
        def exit_code() -> int | None:
            life = records.read_life(self._run_dir, found.worker, found.identity)
            return None if life is None else life.exit_code

        with suppress(ProcessLookupError):
            return AdoptedProcess(found.identity, exit_code)
        return None

    def _write_record(self, name: str, child: _Child) -> None:
        """Record a process. If that fails (full disk), a later supervisor cannot adopt it, and
        fences it instead."""
        try:
            if child.identity is not None:
                record = records.Started(child.identity, str(child.role), child.former_mark)
                records.write_started(self._run_dir, name, record)
        except OSError as error:
            log.warning("process_not_recorded", worker=name, pid=child.process.pid, reason=str(error))

    def output_path(self, worker: str) -> Path:
        return self._run_dir / "logs" / f"{worker}.out"

    def bound_outputs(self) -> None:
        for path in (*(self._run_dir / "logs").glob("*.out"), self._run_dir / "ledger" / "server.log"):
            try:
                if cut(path):
                    log.warning("output_truncated", file=path.name)
            except OSError as error:
                log.warning("output_not_truncated", file=path.name, reason=str(error))

    def logs(self, worker: str) -> str:
        return last_lines(self.output_path(worker))

    def _output_size(self, worker: str) -> int:
        with suppress(OSError):
            return self.output_path(worker).stat().st_size
        return 0
