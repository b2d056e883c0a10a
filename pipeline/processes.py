"""Worker processes: started, signalled, reaped; what they print is kept.

*Consumes* commands. *Produces* processes in sessions of their own (a terminal's Ctrl-C reaches the supervisor alone), and
``<run_dir>/logs/<worker>.out``. *Waits for* nothing: exits are polled.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import structlog

from pipeline.runtime.exit_codes import ExitCode
from protocol.ids import Role

Command = Callable[[Role, Path, str], list[str]]
"""Role, run folder, worker's name -> the command line of its process."""

_MAX_OUTPUT_BYTES = 1 << 20
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


@dataclass(frozen=True, slots=True)
class _Child:
    role: Role
    process: subprocess.Popen[bytes]


def worker_command(role: Role, run_dir: Path, name: str) -> list[str]:
    """Return the command of a real worker; ``-P`` keeps strangers' folders named ``workers`` off the path."""
    return [sys.executable, "-P", "-m", "workers", str(role), "--run-dir", str(run_dir), "--name", name]


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
        """Start a worker's process. One that the system refuses to start is reported by ``reap`` as failed."""
        path = self.output_path(name)
        try:
            is_long = path.exists() and path.stat().st_size > _MAX_OUTPUT_BYTES
            with path.open("wb" if is_long else "ab") as output:
                process = subprocess.Popen(
                    self._command(role, self._run_dir, name),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
        except OSError as error:
            log.error("worker_not_started", worker=name, reason=str(error))
            self._unstarted.append(Exit(name, role, 0, ExitCode.FAILURE))
            return
        self._children[name] = _Child(role, process)
        log.info("worker_started", worker=name, pid=process.pid)

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
                ended.append(Exit(name, child.role, child.process.pid, code))
        return ended

    def kill_all(self) -> None:
        """Kill what is left. Processes are reaped later; killed ones take no time to end."""
        for child in self._children.values():
            child.process.kill()

    def close(self) -> None:
        """Kill what is left and wait until it is gone."""
        self.kill_all()
        for child in self._children.values():
            child.process.wait()
        self._children.clear()

    def output_path(self, worker: str) -> Path:
        """Return where a worker's terminal output goes."""
        return self._run_dir / "logs" / f"{worker}.out"

    def last_lines(self, worker: str) -> str:
        """Return the last lines that a worker wrote to its terminal; empty when there are none."""
        try:
            tail = self.output_path(worker).read_bytes()[-_TAIL_BYTES:]
        except OSError:
            return ""
        return "\n".join(tail.decode(errors="replace").splitlines()[-_LAST_LINES:])
