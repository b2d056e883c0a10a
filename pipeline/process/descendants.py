"""What a process started is found and ended with it, however it detached itself.

*Consumes* ``/proc``. *Produces* ends of processes. *Waits for* nothing: a killed process takes no
time to go.

A process group catches nearly everything; a daemon leaves its group and its session. So what we
start carries a mark in its environment, which everything that it starts inherits. What clears its
environment on purpose escapes: malice, no accident. Without ``/proc`` (macOS) groups are all there
is.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from contextlib import suppress
from pathlib import Path

WORKER_MARK = "HEADRACE_WORKER"
"""In the environment of everything that a supervisor's worker is or starts: ``worker_mark``."""
SANDBOX_MARK = "HEADRACE_SANDBOX"
"""In the environment of everything that a verifier's sandbox process is or starts: a
random name.
"""

_PROC = Path("/proc")
_ROUNDS = 50
"""Of looking for what was started while we killed."""


def worker_mark(run_dir: Path, worker: str | None = None) -> str:
    """Return the mark of one worker of a run, or what the marks of all its workers begin with."""
    return f"{run_dir.resolve()}#" if worker is None else f"{run_dir.resolve()}#{worker}#"


def marked(name: str, beginning: str) -> list[int]:
    """Return the processes of this user, this one aside, whose environment has ``name`` with a
    value that so begins.
    """
    wanted = os.fsencode(f"{name}={beginning}")
    found: list[int] = []
    for pid in _pids():
        # it has ended, or is another user's
        with suppress(OSError):
            environment = (_PROC / str(pid) / "environ").read_bytes()
            if pid != os.getpid() and any(entry.startswith(wanted) for entry in environment.split(b"\0")):
                found.append(pid)
    return found


def end_marked(name: str, beginning: str) -> int:
    """Kill every process so marked, and what they start meanwhile; return how many there were."""
    ended: set[int] = set()
    for _ in range(_ROUNDS):
        left = marked(name, beginning)
        for pid in left:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        ended.update(left)
        if not left:
            break
    return len(ended)


def session_sizes(sessions: AbstractSet[int]) -> dict[int, int]:
    """Return how many processes each of these sessions has, zombies aside."""
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
