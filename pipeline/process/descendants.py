"""Finds and kills a process's descendants, however they have detached themselves.

A daemon leaves its process group and its session. So a process gets a mark in its environment,
which all its descendants inherit. A descendant that clears its environment escapes; that is malice,
no accident. Without ``/proc`` (macOS) only process groups are ended."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

WORKER_MARK = "HEADRACE_WORKER"
"""Environment variable of a worker and its descendants; its value is ``worker_mark``."""
SANDBOX_MARK = "HEADRACE_SANDBOX"
"""Environment variable of a verifier's sandbox and its descendants; its value is a random name."""

_PROC = Path("/proc")
_ROUNDS = 100
"""Most searches for processes that were started during the killing."""
_KERNEL_THREAD = 0x00200000
"""Flag of a process without memory of its own (``PF_KTHREAD``)."""
_EXEC_S = 0.01
"""Pause before the next search, when a process was in the middle of ``exec``."""


def worker_mark(run_dir: Path, worker: str | None = None) -> str:
    """Return the mark of a run's worker, or the common beginning of its workers' marks."""
    return f"{run_dir.resolve()}#" if worker is None else f"{run_dir.resolve()}#{worker}#"


def marked(name: str, beginning: str) -> list[int]:
    """Return this user's other processes whose variable ``name`` starts with ``beginning``."""
    return _search(name, beginning)[0]


def _search(name: str, beginning: str) -> tuple[list[int], bool]:
    """Return the processes so marked, and whether a process without an environment yet was met."""
    wanted = os.fsencode(f"{name}={beginning}")
    found: list[int] = []
    is_executing = False
    for pid in _pids():
        # The process has ended, or is another user's.
        with suppress(OSError):
            environment = (_PROC / str(pid) / "environ").read_bytes()
            is_executing |= not environment and _executes(pid)
            if pid != os.getpid() and any(entry.startswith(wanted) for entry in environment.split(b"\0")):
                found.append(pid)
    return found, is_executing


def _executes(pid: int) -> bool:
    """Return whether a process is in the middle of ``exec``: its new memory has no environment yet.

    Its parent has already gone on, so a kill may come just now."""
    state, *fields = (_PROC / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()
    # proc(5): flags and env_end are fields 9 and 51; the first one here is field 4.
    return state not in (b"Z", b"X") and not int(fields[5]) & _KERNEL_THREAD and int(fields[47]) == 0


def end_marked(name: str, beginning: str) -> int:
    """Kill every process so marked, and those that it starts meanwhile; return their number."""
    ended: set[int] = set()
    for _ in range(_ROUNDS):
        left, is_executing = _search(name, beginning)
        for pid in left:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        ended.update(left)
        if is_executing:
            time.sleep(_EXEC_S)
        elif not left:
            break
    return len(ended)


@dataclass(slots=True)
class SessionUsage:
    """What the living processes of a session are and have used."""

    num_processes: int = 0
    """Without zombies."""
    cpu_s: float = 0.0
    """Processor time in seconds, with that of ended children that were waited for."""
    others_cpu_s: float = 0.0
    """Of it, that of processes other than the session's leader."""


def session_usage(sessions: AbstractSet[int]) -> dict[int, SessionUsage]:
    """Return the usage of each session, by its leader; all zero without ``/proc``."""
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
    """Return the processor time of a process and of its ended children that it waited for; 0 where
    it is not known."""
    with suppress(OSError):
        return _cpu_s(_stat(pid)[4:])
    return 0.0


def _stat(pid: int) -> list[bytes]:
    """Return the fields of ``/proc/PID/stat`` from the state on."""
    return (_PROC / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()


def _cpu_s(fields: Sequence[bytes]) -> float:
    """``fields``: from the terminal on; proc(5) has utime, stime, cutime and cstime as 14 to 17."""
    return sum(map(int, fields[7:11])) / os.sysconf("SC_CLK_TCK")


def _pids() -> Iterator[int]:
    with suppress(OSError):
        yield from (int(path.name) for path in _PROC.iterdir() if path.name.isdecimal())
