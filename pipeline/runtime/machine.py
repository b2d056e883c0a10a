"""This machine's processor cores and memory, within CPU affinity and cgroup limits, and its instructions."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

CONTROL_GROUPS = Path("/sys/fs/cgroup")
"""The kernel's cgroup files; in a container, its own."""
_CPU = Path("/proc/cpuinfo")
_BFLOAT16 = frozenset({"amx_bf16", "avx512_bf16", "bf16"})


@dataclass(frozen=True, slots=True)
class Machine:
    num_cores: int
    memory_bytes: int
    has_bfloat16: bool = False
    """Whether the processor has instructions for products in bfloat16 (AMX, AVX-512 BF16, or Arm's BF16)."""


def this_machine(groups: Path = CONTROL_GROUPS) -> Machine:
    """Return this machine's cores and memory, as limited by affinity and cgroup."""
    with_affinity = getattr(os, "sched_getaffinity", None)
    cores = len(with_affinity(0)) if with_affinity else os.cpu_count() or 1
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if (share := _core_share(groups)) is not None:
        cores = min(cores, max(1, share))
    limits = (_number(groups / "memory.max"), _number(groups / "memory" / "memory.limit_in_bytes"))
    return Machine(cores, min([memory, *(limit for limit in limits if limit)]), _has_bfloat16(_CPU))


@cache
def _has_bfloat16(cpu: Path) -> bool:
    """Read once: the file has a paragraph for each core, and free memory is asked for in every update."""
    with suppress(OSError):
        flags = re.search(
            r"^(?:flags|Features)\s*:(.*)$", cpu.read_text(encoding="utf-8", errors="replace"), re.MULTILINE
        )
        return flags is not None and not _BFLOAT16.isdisjoint(flags[1].split())
    return False


def free_in_group(groups: Path = CONTROL_GROUPS) -> int | None:
    """Return how many bytes the cgroup (version 2, then 1) still allows, counting reclaimable page cache as
    free; None without a limit."""
    old = groups / "memory"
    for most, taken, stat in (
        (_number(groups / "memory.max"), _number(groups / "memory.current"), groups / "memory.stat"),
        (_number(old / "memory.limit_in_bytes"), _number(old / "memory.usage_in_bytes"), old / "memory.stat"),
    ):
        if most is None or taken is None:
            continue
        pages: dict[str, str] = {}
        with suppress(OSError, ValueError):
            pages = dict(line.split() for line in stat.read_text(encoding="ascii").splitlines())
        can_go = int(pages.get("total_inactive_file", pages.get("inactive_file", 0)))
        return max(0, most - taken + can_go)
    return None


def free_memory(meminfo: Path = Path("/proc/meminfo"), groups: Path = CONTROL_GROUPS) -> int:
    """Return the bytes of memory that a new process may use on this host."""
    machine, in_group = this_machine(groups).memory_bytes, free_in_group(groups)
    free = machine if in_group is None else min(machine, in_group)
    with suppress(OSError, ValueError, StopIteration):
        lines = meminfo.read_text(encoding="ascii").splitlines()
        line = next(line for line in lines if line.startswith("MemAvailable"))
        free = min(free, int(line.split()[1]) << 10)
    return free


def _core_share(groups: Path) -> int | None:
    """Return the cgroup's quota in whole cores (version 2, then 1); None without a quota."""
    with suppress(OSError, ValueError):
        quota, period = (groups / "cpu.max").read_text(encoding="ascii").split()
        return None if quota == "max" else int(quota) // int(period)
    quota = _number(groups / "cpu" / "cpu.cfs_quota_us")
    period = _number(groups / "cpu" / "cpu.cfs_period_us")
    return quota // period if quota and period else None


def _number(path: Path) -> int | None:
    """Return a file's positive number; None if there is none."""
    with suppress(OSError, ValueError):
        return max(int(path.read_text(encoding="ascii")), 0) or None
    return None
