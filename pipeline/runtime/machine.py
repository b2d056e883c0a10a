"""What this machine gives a run: processor cores and memory.

*Consumes* the scheduler's affinity, the memory's size, and the limits of the control group (a
container's). *Produces* numbers. *Waits for* nothing.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_GROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class Machine:
    """What processes of this user may share."""

    num_cores: int
    memory_bytes: int


def this_machine(groups: Path = _GROUPS) -> Machine:
    """Return this machine's cores and memory, as far as affinity and control group leave them to
    us.
    """
    with_affinity = getattr(os, "sched_getaffinity", None)
    cores = len(with_affinity(0)) if with_affinity else os.cpu_count() or 1
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if (share := _core_share(groups)) is not None:
        cores = min(cores, max(1, share))
    limits = (_number(groups / "memory.max"), _number(groups / "memory" / "memory.limit_in_bytes"))
    return Machine(cores, min([memory, *(limit for limit in limits if limit)]))


def _core_share(groups: Path) -> int | None:
    """Return the whole cores that the control group grants (version 2, then 1); None without a
    quota.
    """
    with suppress(OSError, ValueError):
        quota, period = (groups / "cpu.max").read_text(encoding="ascii").split()
        return None if quota == "max" else int(quota) // int(period)
    quota = _number(groups / "cpu" / "cpu.cfs_quota_us")
    period = _number(groups / "cpu" / "cpu.cfs_period_us")
    return quota // period if quota and period else None


def _number(path: Path) -> int | None:
    """Return the positive number that a file holds; None when it holds none."""
    with suppress(OSError, ValueError):
        return max(int(path.read_text(encoding="ascii")), 0) or None
    return None
