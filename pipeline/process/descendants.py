"""Finds and kills a process's descendants, however they have detached themselves.

A daemon leaves its process group and its session. So a process gets a mark in its environment,
which all its descendants inherit. A descendant that clears its environment escapes; that is malice,
no accident. Without ``/proc`` (macOS) only process groups are ended."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from contextlib import suppress
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


def session_sizes(sessions: AbstractSet[int]) -> dict[int, int]:
    """Return the number of processes of each session, without zombies."""
    sizes = dict.fromkeys(sessions, 0)
    for pid in _pids():
        with suppress(OSError):
            stat = (_PROC / str(pid) / "stat").read_bytes()
            state, _, _, session = stat.rpartition(b")")[2].split()[:4]
            if state != b"Z" and int(session) in sizes:
                sizes[int(session)] += 1
    return sizes


def _pids() -> Iterator[int]:
    with suppress(OSError):
        yield from (int(path.name) for path in _PROC.iterdir() if path.name.isdecimal())
