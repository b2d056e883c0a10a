"""Worker processes: started or adopted, signalled, reaped; what they print is kept.

*Consumes* commands. *Produces* processes in sessions of their own (a terminal's Ctrl-C reaches the
supervisor alone), ``<run_dir>/logs/<worker>.out``, and a record of each, by which a later
supervisor finds it. *Waits for* nothing: exits are polled. What a worker started and left behind is
ended with it; its environment has no password of the ledger.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import structlog

from pipeline.files import cut
from pipeline.ledger.url import without_ledger_password
from pipeline.process.descendants import WORKER_MARK, end_marked, worker_mark
from pipeline.process.exit_codes import ExitCode
from pipeline.process.last_error import LastError, printed_error
from pipeline.process.records import (
    ProcessIdentity,
    Started,
    forget_started,
    identify,
    read_life,
    read_started,
    this_host,
    write_started,
)
from pipeline.supervisor.adopted_process import AdoptedProcess
from protocol import headrace
from protocol.ids import Role

Command = Callable[[Role, Path, str], list[str]]
"""Role, run folder, worker's name -> the command line of its process."""

_TAIL_BYTES = 64 << 10
_LAST_LINES = 20

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Exit:
    """A process that has ended."""

    worker: str
    role: Role
    pid: int
    code: int
    """Negative: the number of the signal that killed it."""
    error: LastError | None = None
    """What ended it, as it wrote down or printed."""
    delivered: int = 0
    """Pieces of work that it had finished for good."""


@dataclass(frozen=True, slots=True)
class Found:
    """A worker's process of an earlier supervisor that still runs."""

    worker: str
    role: Role
    identity: ProcessIdentity
    epoch: int
    """As it says itself; 0 while it is not registered."""

    @property
    def pid(self) -> int:
        """Its process id."""
        return self.identity.pid


@dataclass(frozen=True, slots=True)
class _Child:
    role: Role
    process: subprocess.Popen[bytes] | AdoptedProcess
    identity: ProcessIdentity | None
    output_from: int
    """Where in its output file this process began to print."""


def worker_command(role: Role, run_dir: Path, name: str) -> list[str]:
    """Return the command of a real worker."""
    return headrace.command("workers", str(role), "--run-dir", str(run_dir), "--name", name)


class Processes:
    """The processes of one supervisor, by worker."""

    def __init__(self, run_dir: Path, command: Command = worker_command) -> None:
        self._run_dir = run_dir
        self._command = command
        self._children: dict[str, _Child] = {}
        self._unstarted: list[Exit] = []

    @property
    def pids(self) -> dict[str, int]:
        """Process ids by worker."""
        return {name: child.process.pid for name, child in self._children.items()}

    def start(self, role: Role, name: str) -> None:
        """Start a worker's process. One that the system refuses to start is reported by ``reap`` as
        failed.
        """
        try:
            with self.output_path(name).open("ab") as output:
                output_from = output.tell()
                process = subprocess.Popen(
                    self._command(role, self._run_dir, name),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    env=without_ledger_password(os.environ) | {WORKER_MARK: worker_mark(self._run_dir, name)},
                )
        except OSError as error:
            log.error("worker_not_started", worker=name, reason=str(error))
            self._unstarted.append(Exit(name, role, 0, ExitCode.FAILURE))
            return
        self._children[name] = _Child(role, process, identify(process.pid), output_from)
        self._put_on_record(name, self._children[name])
        log.info("worker_started", worker=name, pid=process.pid)

    def find(self) -> list[Found]:
        """Return the workers' processes on record that run on this host and are not held here."""
        found: list[Found] = []
        for worker, record in read_started(self._run_dir).items():
            identity = record.identity
            if worker in self._children or identify(identity.pid) != identity:
                continue
            life = read_life(self._run_dir, worker, identity)
            found.append(Found(worker, Role(record.role), identity, life.epoch if life else 0))
        return found

    def adopt(self, found: Found) -> bool:
        """Hold a process of an earlier supervisor from now on; False when it has just ended."""
        process = self._hold(found)
        if process is not None:
            self._children[found.worker] = _Child(found.role, process, found.identity, self._output_size(found.worker))
        return process is not None

    def end(self, found: Found) -> None:
        """Kill a process that is not held here, and wait until it is gone."""
        if process := self._hold(found):
            process.kill()
            process.wait()
        self._buried(found.worker)

    def signal(self, name: str, number: signal.Signals) -> None:
        """Send a signal to a worker that is still there."""
        if child := self._children.get(name):
            child.process.send_signal(number)

    def reap(self) -> list[Exit]:
        """Return the processes that have ended since the last call."""
        ended, self._unstarted = self._unstarted, []
        for name, child in list(self._children.items()):
            code = child.process.poll()
            if code is not None:
                del self._children[name]
                self._buried(name)
                ended.append(self._exit(name, child, code))
        return ended

    def _exit(self, name: str, child: _Child, code: int) -> Exit:
        """Return how a process ended: what it wrote down of itself, else what it printed last."""
        life = None if child.identity is None else read_life(self._run_dir, name, child.identity)
        error, delivered = (None, 0) if life is None else (life.error, life.delivered)
        if error is None and code > 0:
            error = printed_error(self._output(name, child.output_from))
        return Exit(name, child.role, child.process.pid, code, error if code > 0 else None, delivered)

    def kill_all(self) -> None:
        """Kill what is left. Processes are reaped later; killed ones take no time to end."""
        for child in self._children.values():
            child.process.kill()

    def close(self) -> None:
        """Kill what is left and wait until it is gone."""
        self.kill_all()
        for name, child in self._children.items():
            child.process.wait()
            self._buried(name)
        self._children.clear()

    def end_strays(self) -> int:
        """Kill the workers of this run that are still on this host, and what they started; return
        how many that were.

        For a run that has ended, when no process of it is to be kept.
        """
        num_ended = end_marked(WORKER_MARK, worker_mark(self._run_dir))
        for worker, record in read_started(self._run_dir).items():
            if record.identity.host == this_host() and identify(record.identity.pid) != record.identity:
                forget_started(self._run_dir, worker)
        return num_ended

    def _buried(self, worker: str) -> None:
        """A worker has ended: end what it left behind, and take it off the record."""
        if left := end_marked(WORKER_MARK, worker_mark(self._run_dir, worker)):
            log.warning("stray_processes_ended", worker=worker, num_processes=left)
        forget_started(self._run_dir, worker)

    def _hold(self, found: Found) -> AdoptedProcess | None:
        def exit_code() -> int | None:
            life = read_life(self._run_dir, found.worker, found.identity)
            return None if life is None else life.exit_code

        with suppress(ProcessLookupError):
            return AdoptedProcess(found.identity, exit_code)
        return None

    def _put_on_record(self, name: str, child: _Child) -> None:
        """Without a record (the disk is full) a later supervisor starts its own, which fences this
        one.
        """
        try:
            if child.identity is not None:
                write_started(self._run_dir, name, Started(child.identity, str(child.role)))
        except OSError as error:
            log.warning("process_not_recorded", worker=name, pid=child.process.pid, reason=str(error))

    def output_path(self, worker: str) -> Path:
        """Return where a worker's terminal output goes."""
        return self._run_dir / "logs" / f"{worker}.out"

    def bound_outputs(self) -> None:
        """Cut what workers wrote to their terminals, and the embedded server's log, where it has
        become long.
        """
        for path in (*(self._run_dir / "logs").glob("*.out"), self._run_dir / "ledger" / "server.log"):
            try:
                if cut(path):
                    log.warning("output_truncated", file=path.name)
            except OSError as error:
                log.warning("output_not_truncated", file=path.name, reason=str(error))

    def last_lines(self, worker: str) -> str:
        """Return the last lines that a worker wrote to its terminal; empty when there are none."""
        return "\n".join(self._output(worker).splitlines()[-_LAST_LINES:])

    def _output_size(self, worker: str) -> int:
        with suppress(OSError):
            return self.output_path(worker).stat().st_size
        return 0

    def _output(self, worker: str, begin: int = 0) -> str:
        """Return what a worker printed from byte ``begin`` on, at most the last of it."""
        try:
            with self.output_path(worker).open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                # it is shorter when it was cut
                file.seek(max(begin if begin <= size else 0, size - _TAIL_BYTES))
                return file.read().decode(errors="replace")
        except OSError:
            return ""
