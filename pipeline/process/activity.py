"""Whether a process runs at all, by the kernel's count of each thread's time on a processor.

A live worker's heartbeat thread runs every second, and a ledger server's clock ten times a second.
So a process of which no thread has run for seconds is stopped: it is not slow, and no load explains
it. A thread that wants a processor, waits for a disk or is held by a debugger may yet go on by
itself. Of such a process nothing is said."""

from __future__ import annotations

from pathlib import Path

_PROC = Path("/proc")
_MAY_GO_ON = frozenset("RDtxXKWP")
"""States of a thread that runs, waits for a processor or a disk, is traced, or ends."""


def activity_of(pid: int) -> str:
    """Return a mark that changes once any thread of the process has run.

    "" where that cannot be told: the process is gone, a thread of it may go on by itself, or the
    kernel keeps no such count (``CONFIG_SCHED_INFO``)."""
    marks: list[str] = []
    try:
        for thread in sorted((_PROC / str(pid) / "task").iterdir()):
            status = (thread / "stat").read_text(encoding="utf-8", errors="replace")
            if status.rpartition(")")[2].split()[0] in _MAY_GO_ON:
                return ""
            counted = (thread / "schedstat").read_text(encoding="ascii")
            if not any(map(int, counted.split())):
                return ""
            marks.append(f"{thread.name}:{counted.strip()}")
    except OSError:
        return ""
    return " ".join(marks)
