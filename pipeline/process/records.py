"""``<run_dir>/processes/``: records of worker processes, from which a new supervisor takes them
over.

    <worker>.json        written by the supervisor at the start: host, process id, start time, role, mark as a standby
    <worker>.life.json   written by the worker: the same process, its epoch once registered; at the end its
                         exit code, its error, and its finished work

The system reuses process ids, so a process is identified by its id, its start time on the kernel's
clock, and the host's boot. Only a parent can wait for a process; a supervisor that has adopted one
reads the exit code here."""

from __future__ import annotations

import os
import socket
import subprocess
from contextlib import suppress
from functools import cache
from pathlib import Path

import msgspec

from pipeline.files import write_private
from pipeline.process.exit_codes import LastError

FOLDER = "processes"
WORKER_PID = "HEADRACE_WORKER_PID"
"""Environment variable set for each rank of a multi-rank worker: the process id of their launcher,
which stands for the worker."""
_LIFE = ".life.json"


class ProcessIdentity(msgspec.Struct, frozen=True):
    """Identifies a process uniquely, even after its id is reused."""

    host: str
    pid: int
    started: str
    """Boot id and kernel start time; on systems other than Linux the start time in words."""


class Started(msgspec.Struct, frozen=True):
    """The supervisor's record of a worker process."""

    identity: ProcessIdentity
    role: str
    former_mark: str = ""
    """Mark of the processes that it started as a standby (``pipeline.process.descendants``); "" if
    it was none."""


class Life(msgspec.Struct, frozen=True):
    identity: ProcessIdentity
    epoch: int = 0
    """0 until it has registered."""
    exit_code: int | None = None
    error: LastError | None = None
    delivered: int = 0
    """Number of finished pieces of work."""


def worker_pid() -> int:
    """Return the process id that stands for this worker: this process, or the launcher of its
    ranks."""
    return int(os.environ.get(WORKER_PID) or os.getpid())


def identify(pid: int) -> ProcessIdentity | None:
    """Return the identity of a running process; None if it is gone or a zombie."""
    started = _started(pid)
    return None if started is None else ProcessIdentity(this_host(), pid, started)


def write_started(run_dir: Path, worker: str, record: Started) -> None:
    (run_dir / FOLDER).mkdir(mode=0o700, exist_ok=True)
    write_private(run_dir / FOLDER / f"{worker}.json", msgspec.json.encode(record))


def write_life(run_dir: Path, worker: str, record: Life) -> None:
    """Write this worker's own record. Raises OSError, for example if no run was started here."""
    write_private(run_dir / FOLDER / f"{worker}{_LIFE}", msgspec.json.encode(record))


def record_end(run_dir: Path, worker: str, exit_code: int) -> None:
    """Add the exit code to this process's own record; a failed write is ignored."""
    identity = identify(os.getpid())
    if identity is not None:
        life = read_life(run_dir, worker, identity) or Life(identity)
        with suppress(OSError):
            write_life(run_dir, worker, msgspec.structs.replace(life, exit_code=exit_code))


def read_started(run_dir: Path) -> dict[str, Started]:
    """Return each worker's last start record; unreadable files count as absent."""
    found: dict[str, Started] = {}
    for path in sorted((run_dir / FOLDER).glob("*.json")):
        if path.name.endswith(_LIFE):
            continue
        with suppress(OSError, msgspec.DecodeError):
            found[path.name.removesuffix(".json")] = msgspec.json.decode(path.read_bytes(), type=Started)
    return found


def read_life(run_dir: Path, worker: str, identity: ProcessIdentity) -> Life | None:
    """Return the record that exactly this process wrote; None without one."""
    with suppress(OSError, msgspec.DecodeError):
        life = msgspec.json.decode((run_dir / FOLDER / f"{worker}{_LIFE}").read_bytes(), type=Life)
        return life if life.identity == identity else None
    return None


def has_life(run_dir: Path, worker: str) -> bool:
    """Return whether a worker of this name ever wrote its own record here, whichever process
    started it."""
    return (run_dir / FOLDER / f"{worker}{_LIFE}").exists()


def forget_started(run_dir: Path, worker: str) -> None:
    (run_dir / FOLDER / f"{worker}.json").unlink(missing_ok=True)


def process_runs(pid: int) -> bool:
    """Return whether a process exists and is not a zombie."""
    if _signal(pid, 0):
        return False
    try:
        status = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        # no /proc: rely on the signal's result
        return True
    return status.rpartition(")")[2].split()[0] != "Z"


@cache
def this_host() -> str:
    return socket.gethostname()


@cache
def boot_id() -> str:
    """Return the id of this host's boot, the same in all its containers."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def _started(pid: int) -> str | None:
    """Return the start of a process as a text, unique among processes with this id."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return _started_elsewhere(pid)
    except ProcessLookupError:
        return None
    # the process name in brackets may hold any character
    fields = status.rpartition(")")[2].split()
    state, ticks = fields[0], fields[19]
    return None if state in "ZX" else f"{boot_id()} {ticks}"


def _started_elsewhere(pid: int) -> str | None:
    if Path("/proc/self/stat").exists():
        return None
    with suppress(ProcessLookupError):
        os.kill(pid, 0)
        shown = subprocess.run(
            ["ps", "-o", "state=,lstart=", "-p", str(pid)],  # noqa: S607
            capture_output=True,
            text=True,
            timeout=5,
        )
        state, _, started = shown.stdout.strip().partition(" ")
        return None if not started or state.startswith("Z") else started.strip()
    return None


def _signal(pid: int, number: int) -> bool:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False


# ``<run_dir>/standbys/``: messages between standbys and their supervisor, as files.
#
#     <standby>.json         by the standby, once a second: its process, roles, weights and memory
#     <standby>.order.json   by the supervisor: which worker to become; the standby removes it, then obeys
#
# An order also names the process id, so that a standby of an earlier supervisor ignores it.

_FOLDER = "standbys"
_ORDER = ".order.json"


class StandbyReport(msgspec.Struct, frozen=True):
    """A standby's own record, rewritten while it loads and waits."""

    pid: int
    turn: int
    """Increases with each report."""
    roles: tuple[str, ...]
    """Roles that it is ready to take; empty while it loads."""
    version: int | None
    """Version of the weights that it holds; None if it follows none."""
    memory_bytes: int
    """Memory of this process alone, without shared pages."""
    prepared_s: float
    """Seconds from its start until everything was loaded; 0 before that."""
    progress: int = 0
    """Number of loading steps finished so far."""
    is_taking: bool = False
    """Whether it is loading a newer version of the weights."""

    def in_words(self, name: str) -> str:
        """Return a sentence: ``standby-1 waits to be a generator or reward: 812 MiB idle``."""
        if not self.roles:
            return f"{name} loads: {self.memory_bytes >> 20} MiB so far"
        weights = "" if self.version is None else f", weights of version {self.version}"
        return f"{name} waits to be a {' or '.join(self.roles)}: {self.memory_bytes >> 20} MiB idle{weights}"


class StandbyOrder(msgspec.Struct, frozen=True):
    pid: int
    role: str
    worker: str


def standbys_folder(run_dir: Path) -> Path:
    return run_dir / _FOLDER


def clear_standbys(run_dir: Path) -> None:
    """Create the folder, and remove what earlier standbys left in it. Raises OSError."""
    folder = standbys_folder(run_dir)
    folder.mkdir(mode=0o700, exist_ok=True)
    for path in folder.iterdir():
        path.unlink(missing_ok=True)


def write_report(run_dir: Path, standby: str, report: StandbyReport) -> None:
    write_private(standbys_folder(run_dir) / f"{standby}.json", msgspec.json.encode(report))


def read_report(run_dir: Path, standby: str) -> StandbyReport | None:
    """Return a standby's newest report; None without a readable one."""
    with suppress(OSError, msgspec.MsgspecError):
        return msgspec.json.decode((standbys_folder(run_dir) / f"{standby}.json").read_bytes(), type=StandbyReport)
    return None


def read_reports(run_dir: Path) -> dict[str, StandbyReport]:
    found: dict[str, StandbyReport] = {}
    with suppress(OSError):
        names = [path.stem for path in standbys_folder(run_dir).glob("*.json") if not path.name.endswith(_ORDER)]
        found = {name: report for name in sorted(names) if (report := read_report(run_dir, name)) is not None}
    return found


def remove_report(run_dir: Path, standby: str) -> None:
    """Remove the files of a standby that has ended or become a worker; failures are ignored."""
    for path in (standbys_folder(run_dir) / f"{standby}.json", order_path(run_dir, standby)):
        with suppress(OSError):
            path.unlink(missing_ok=True)


def order_path(run_dir: Path, standby: str) -> Path:
    return standbys_folder(run_dir) / f"{standby}{_ORDER}"


def give_order(run_dir: Path, standby: str, order: StandbyOrder) -> None:
    write_private(order_path(run_dir, standby), msgspec.json.encode(order))


def take_order(run_dir: Path, standby: str, pid: int) -> StandbyOrder | None:
    """Return and remove the order addressed to process ``pid``; None without one."""
    path = order_path(run_dir, standby)
    with suppress(OSError, msgspec.MsgspecError):
        order = msgspec.json.decode(path.read_bytes(), type=StandbyOrder)
        if order.pid == pid:
            path.unlink()
            return order
    return None
