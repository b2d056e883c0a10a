"""``<run_dir>/processes/``: which processes run a run's workers, for a supervisor that must find
them after another died.

*Consumes* the start of a process (the supervisor tells) and its epoch and exit code (the worker
itself tells). *Produces* one small file each. *Waits for* nothing.

    <worker>.json        by the supervisor, as soon as the process is there: host, process id, start time, role
    <worker>.life.json   by the worker: the same process, its epoch once it is registered; at the end its exit code, the
                         error that ended it, and how much work it had finished

A process id alone means nothing: the system gives it to another process when the first has ended.
With the time at which the process began, by the kernel's clock and within one boot of the host, it
names one process for ever. The exit code is written down because only a parent can wait for a
process: a supervisor that adopts one reads here how it ended.
"""

from __future__ import annotations

import os
import socket
import subprocess
from contextlib import suppress
from functools import cache
from pathlib import Path

import msgspec

from pipeline.files import write_private
from pipeline.process.last_error import LastError

FOLDER = "processes"
WORKER_PID = "HEADRACE_WORKER_PID"
"""Environment of a worker that computes on several ranks: the process that launched them and stands
for the worker.
"""
_LIFE = ".life.json"


class ProcessIdentity(msgspec.Struct, frozen=True):
    """One process of one host, for ever."""

    host: str
    pid: int
    started: str
    """Boot of the host and the kernel's start time of the process; elsewhere than on Linux the
    start time in words.
    """


class Started(msgspec.Struct, frozen=True):
    """A worker's process, as the supervisor that started it says."""

    identity: ProcessIdentity
    role: str


class Life(msgspec.Struct, frozen=True):
    """A worker's process, as it says itself."""

    identity: ProcessIdentity
    epoch: int = 0
    """0 until it is registered."""
    exit_code: int | None = None
    error: LastError | None = None
    """What ended it, if an error did."""
    delivered: int = 0
    """Pieces of work that it had finished for good."""


def worker_pid() -> int:
    """Return the process by which others know this worker: this one, or the launcher
    of its ranks.
    """
    return int(os.environ.get(WORKER_PID) or os.getpid())


def identify(pid: int) -> ProcessIdentity | None:
    """Return who a process id is at this moment; None when there is no such process, or it has
    ended (a zombie has).
    """
    started = _started(pid)
    return None if started is None else ProcessIdentity(this_host(), pid, started)


def write_started(run_dir: Path, worker: str, record: Started) -> None:
    """Say that a process was started. Raises OSError."""
    (run_dir / FOLDER).mkdir(mode=0o700, exist_ok=True)
    write_private(run_dir / FOLDER / f"{worker}.json", msgspec.json.encode(record))


def write_life(run_dir: Path, worker: str, record: Life) -> None:
    """Say how this process lives or has ended. Raises OSError; FileNotFoundError where no
    supervisor ever began a run.
    """
    write_private(run_dir / FOLDER / f"{worker}{_LIFE}", msgspec.json.encode(record))


def record_end(run_dir: Path, worker: str, exit_code: int) -> None:
    """Say with which code this process ends, whatever was said of it before; a disk that refuses
    ends nobody.
    """
    identity = identify(os.getpid())
    if identity is not None:
        life = read_life(run_dir, worker, identity) or Life(identity)
        with suppress(OSError):
            write_life(run_dir, worker, msgspec.structs.replace(life, exit_code=exit_code))


def read_started(run_dir: Path) -> dict[str, Started]:
    """Return worker -> the process that was started last for it; a file that cannot be read counts
    as absent.
    """
    found: dict[str, Started] = {}
    for path in sorted((run_dir / FOLDER).glob("*.json")):
        if path.name.endswith(_LIFE):
            continue
        with suppress(OSError, msgspec.DecodeError):
            found[path.name.removesuffix(".json")] = msgspec.json.decode(path.read_bytes(), type=Started)
    return found


def read_life(run_dir: Path, worker: str, identity: ProcessIdentity) -> Life | None:
    """Return what this very process says of itself; None when it has said nothing."""
    with suppress(OSError, msgspec.DecodeError):
        life = msgspec.json.decode((run_dir / FOLDER / f"{worker}{_LIFE}").read_bytes(), type=Life)
        return life if life.identity == identity else None
    return None


def forget_started(run_dir: Path, worker: str) -> None:
    """Take a worker's process out of the books: it has ended."""
    (run_dir / FOLDER / f"{worker}.json").unlink(missing_ok=True)


@cache
def this_host() -> str:
    """Return the name by which this host is recorded."""
    return socket.gethostname()


@cache
def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def _started(pid: int) -> str | None:
    """Return when a process began, in words that no other process of this id ever gets."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return _started_elsewhere(pid)
    except ProcessLookupError:
        return None
    # the name before may hold anything
    fields = status.rpartition(")")[2].split()
    state, ticks = fields[0], fields[19]
    return None if state in "ZX" else f"{_boot()} {ticks}"


def _started_elsewhere(pid: int) -> str | None:
    if Path("/proc/self/stat").exists():
        return None
    with suppress(ProcessLookupError):
        os.kill(pid, 0)
        told = subprocess.run(["ps", "-o", "state=,lstart=", "-p", str(pid)], capture_output=True, text=True, timeout=5)  # noqa: S607
        state, _, started = told.stdout.strip().partition(" ")
        return None if not started or state.startswith("Z") else started.strip()
    return None
