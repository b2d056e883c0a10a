"""Finds and kills a process's descendants, however they have detached themselves.

A daemon leaves its process group and session, so each worker carries a mark in its environment,
which descendants inherit. A descendant that clears its environment escapes that search, but not the
one below a process that adopts orphans (``adopting``). Without ``/proc`` (macOS) only process
groups are killed."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import tempfile
import time
from collections.abc import Generator, Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from protocol.endpoints import run_tag

WORKER_MARK = "HEADRACE_WORKER"
"""Environment variable of a worker and its descendants; its value is ``worker_mark()``."""
SANDBOX_MARK = "HEADRACE_SANDBOX"
"""Environment variable of a verifier's sandbox and its descendants; its value is a random name."""

_PROC = Path("/proc")
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 1, 36, 37
_ROUNDS = 100
"""Maximum number of searches for processes that start during the killing."""
_KERNEL_THREAD = 0x00200000
"""The flag ``PF_KTHREAD``."""
_TRACKER_S = 4.0
"""Longest wait for resource trackers, which end once all that they track have ended."""
_TRACKER_POLL_S = 0.05
_EXEC_S = 0.01
"""Pause before searching again when a process was in the middle of ``exec``."""


def worker_mark(run_dir: Path, worker: str | None = None) -> str:
    """Return the mark of a run's worker, or without ``worker`` the prefix of all its workers'
    marks."""
    return f"{run_dir.resolve()}#" if worker is None else f"{run_dir.resolve()}#{worker}#"


def temporary_folder(kind: str) -> Path:
    """Make a private folder. It has the name of this worker's run, so that ``down`` finds it if the process is
    killed before it has removed it."""
    run_dir = os.environ.get(WORKER_MARK, "").partition("#")[0]
    return Path(tempfile.mkdtemp(prefix=f"{run_tag(Path(run_dir)) if run_dir else 'headrace'}-{kind}-"))


def marked(name: str, beginning: str) -> list[int]:
    """Return this user's other processes whose variable ``name`` starts with ``beginning``."""
    return _search(name, beginning)[0]


def _search(name: str, beginning: str) -> tuple[list[int], bool]:
    """Return the marked processes, and whether any process was met in the middle of ``exec``."""
    wanted = os.fsencode(f"{name}={beginning}")
    found: list[int] = []
    is_executing = False
    for pid in _pids():
        # OSError: the process has ended or is another user's
        with suppress(OSError):
            environment = (_PROC / str(pid) / "environ").read_bytes()
            is_executing |= not environment and _executes(pid)
            if pid != os.getpid() and any(entry.startswith(wanted) for entry in environment.split(b"\0")):
                found.append(pid)
    return found, is_executing


def _executes(pid: int) -> bool:
    """Return whether a process is in the middle of ``exec``, when its new memory has no environment
    yet.

    Its parent may already have continued, so a kill can arrive at this moment."""
    state, *fields = (_PROC / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()
    # proc(5): flags and env_end are fields 9 and 51; `fields` begins with field 4
    return state not in (b"Z", b"X") and not int(fields[5]) & _KERNEL_THREAD and int(fields[47]) == 0


def end_marked(name: str, beginning: str) -> int:
    """Kill all marked processes, and those they start meanwhile; return how many.

    Python's resource trackers get a moment to end by themselves: only they free the shared memory of
    the processes that were killed."""
    ended: set[int] = set()
    patient_until_s = time.monotonic() + _TRACKER_S
    for _ in range(_ROUNDS):
        left, is_executing = _search(name, beginning)
        is_patient = time.monotonic() < patient_until_s
        spared = {pid for pid in left if is_patient and _is_resource_tracker(pid)}
        for pid in set(left) - spared:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
            ended.add(pid)
        if is_executing or spared:
            time.sleep(_EXEC_S if is_executing else _TRACKER_POLL_S)
        elif not left:
            break
    return len(ended)


def _is_resource_tracker(pid: int) -> bool:
    with suppress(OSError):
        return b"multiprocessing.resource_tracker" in (_PROC / str(pid) / "cmdline").read_bytes()
    return False


def descendants(pid: int) -> set[int]:
    """Return the living descendants of ``pid``, without zombies; none without ``/proc``.

    A daemon whose parent has ended counts as a child of the nearest ancestor that adopts
    (``adopting``)."""
    below: dict[int, list[int]] = {}
    zombies: set[int] = set()
    for other in _pids():
        with suppress(OSError):
            state, parent = _stat(other)[:2]
            below.setdefault(int(parent), []).append(other)
            if state in (b"Z", b"X"):
                zombies.add(other)
    found: set[int] = set()
    left = list(below.get(pid, ()))
    while left:
        one = left.pop()
        if one not in found:
            found.add(one)
            left += below.get(one, ())
    return found - zombies


def end_descendants(pid: int, but: AbstractSet[int] = frozenset()) -> int:
    """Kill the descendants of ``pid``, and those they start meanwhile, except ``but``; return how
    many."""
    ended: set[int] = set()
    for _ in range(_ROUNDS):
        left = descendants(pid) - but
        if not left:
            break
        # stop all first: while some are killed the others could start more
        for what in (signal.SIGSTOP, signal.SIGKILL):
            for one in left:
                with suppress(OSError):
                    os.kill(one, what)
        ended |= left
        time.sleep(_EXEC_S / 10)
    return len(ended)


@contextmanager
def adopting() -> Generator[None, None, None]:
    """While the block runs, become the parent of every daemon that a child leaves behind (Linux
    only); then kill and reap them, whatever they did to their environment, group and session."""
    if sys.platform != "linux":
        yield
        return
    before = descendants(os.getpid())
    prctl, former = ctypes.CDLL(None).prctl, ctypes.c_int()
    prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(former))
    prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        end_descendants(os.getpid(), before)
        prctl(_PR_SET_CHILD_SUBREAPER, former.value)
        _reap(before)


def go_on_below_keeper() -> None:
    """Return in a child of this process, which stays as its keeper (Linux only).

    When the child has ended, the keeper kills whatever it has started, daemons and processes without the mark
    too, and ends as the child did. When this process's parent dies, the child is killed. So nothing outlives a
    parent that is killed together with all who would clean up after it."""
    if sys.platform != "linux":
        return
    prctl, parent = ctypes.CDLL(None).prctl, os.getppid()
    prctl(_PR_SET_CHILD_SUBREAPER, 1)
    child = os.fork()
    if child == 0:
        prctl(_PR_SET_CHILD_SUBREAPER, 0)
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        return

    def end_child(*_: object) -> None:
        # it may just have ended by itself
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)

    signal.signal(signal.SIGTERM, end_child)
    prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        end_child()
    # the parent is to see that the child closes its pipes
    os.closerange(0, 3)
    pid = status = 0
    while pid != child:
        pid, status = os.wait()
    end_descendants(os.getpid())
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        with suppress(OSError):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _reap(but: AbstractSet[int]) -> None:
    for pid in _pids():
        with suppress(OSError, ChildProcessError):
            state, parent = _stat(pid)[:2]
            if state == b"Z" and int(parent) == os.getpid() and pid not in but:
                os.waitpid(pid, os.WNOHANG)


@dataclass(slots=True)
class SessionUsage:
    num_processes: int = 0
    """Living ones, without zombies."""
    cpu_s: float = 0.0
    """Processor time in seconds, including that of reaped children."""
    others_cpu_s: float = 0.0
    """The share of ``cpu_s`` not used by the session's leader."""


def session_usage(sessions: AbstractSet[int]) -> dict[int, SessionUsage]:
    """Return the usage of each session by its leader's process id; all zero without ``/proc``."""
    found = {session: SessionUsage() for session in sessions}
    for pid in _pids():
        with suppress(OSError):
            state, _, _, session, *fields = _stat(pid)
            if (usage := found.get(int(session))) is not None:
                cpu_s = _cpu_s(fields)
                usage.num_processes += state != b"Z"
                usage.cpu_s += cpu_s
                usage.others_cpu_s += 0.0 if pid == int(session) else cpu_s
    return found


def cpu_seconds(pid: int) -> float:
    """Return the processor time of a process and its reaped children; 0 if unknown."""
    with suppress(OSError):
        return _cpu_s(_stat(pid)[4:])
    return 0.0


def _stat(pid: int) -> list[bytes]:
    """Return the fields of ``/proc/PID/stat`` from the state (field 3) on."""
    return (_PROC / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()


def _cpu_s(fields: Sequence[bytes]) -> float:
    """``fields`` begins with field 7 of proc(5); utime, stime, cutime and cstime are 14 to 17."""
    return sum(map(int, fields[7:11])) / os.sysconf("SC_CLK_TCK")


def _pids() -> Iterator[int]:
    with suppress(OSError):
        yield from (int(path.name) for path in _PROC.iterdir() if path.name.isdecimal())


# Whether a process runs at all, by the kernel's scheduling statistics of its threads.
#
# A live worker's heartbeat thread runs every second, a ledger server's timer ten times a second. A
# process of which no thread has run for seconds is therefore stopped, not slow, whatever the load.
# A thread that waits for a processor or a disk, or is held by a debugger, may still resume by
# itself; then nothing can be said about the process.

_MAY_GO_ON = frozenset("RDtxXKWP")
"""States of a thread that runs, waits for a processor or a disk, is traced, or is ending."""


@dataclass(frozen=True, slots=True)
class Activity:
    """How much a process has run so far, all of whose threads sleep or are stopped.

    If two samples are equal, no thread ran between them."""

    wanted_ns: int
    """Time on a processor plus time waiting for one."""
    num_slices: int
    """How often a thread was scheduled."""


def activity_of(pid: int) -> Activity | None:
    """Return the activity of a process on this host.

    None if it cannot be judged: the process is gone, one of its threads may resume by itself, or
    the kernel keeps no such statistics (``CONFIG_SCHED_INFO``)."""
    wanted_ns = num_slices = 0
    try:
        for thread in (_PROC / str(pid) / "task").iterdir():
            status = (thread / "stat").read_text(encoding="utf-8", errors="replace")
            if status.rpartition(")")[2].split()[0] in _MAY_GO_ON:
                return None
            ran, delayed, slices = map(int, (thread / "schedstat").read_text(encoding="ascii").split())
            wanted_ns += ran + delayed
            num_slices += slices
    except OSError:
        return None
    return Activity(wanted_ns, num_slices) if num_slices else None
