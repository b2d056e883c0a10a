"""Whether a process runs at all, by the kernel's count of each thread's time.

A live worker's heartbeat thread runs every second, and a ledger server's clock ten times a second.
So a process of which no thread has run for seconds is stopped: it is not slow, and no load explains
it. A thread that wants a processor, waits for a disk or is held by a debugger may yet go on by
itself. Of such a process nothing is known."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_MAY_GO_ON = frozenset("RDtxXKWP")
"""States of a thread that runs, waits for a processor or a disk, is traced, or ends."""


@dataclass(frozen=True, slots=True)
class Activity:
    """The work so far of a process whose threads all sleep or are stopped.

    Two are equal if no thread has run between them."""

    wanted_ns: int
    """Time on a processor, and time waiting for one."""
    num_slices: int
    """Times that a thread was put on a processor."""


def activity_of(pid: int) -> Activity | None:
    """Return the activity of a process of this host.

    None where nothing is known: the process is gone, or a thread of it may go on by itself. So it
    is where the kernel keeps no such count (``CONFIG_SCHED_INFO``)."""
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
