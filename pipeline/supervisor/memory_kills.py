"""Tells workers that the kernel killed for lack of memory from those that somebody else killed.

A SIGKILL does not say who sent it, but the kernel counts its OOM kills, per control group and for
the host. The counts are read at every poll, so that an earlier kill never explains a later exit, and
each kill explains one exit."""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from pipeline.fleet.state import Worker
from pipeline.runtime.machine import CONTROL_GROUPS, this_machine
from protocol.ids import Role

_PROC: Final = Path("/proc")
_COUNT: Final = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)
_COUNTERS: Final = ("memory.events", "memory.oom_control")
"""Files with counts of OOM kills, in control groups of version 2 and 1."""
_NAMED: Final = 8
_REMEDIES: Final = {
    Role.LEARNER: "learner.micro_batch_tokens, or set checkpoint.snapshots to off",
    Role.VALUE: "value.micro_batch_tokens, or set checkpoint.snapshots to off",
    Role.GENERATOR: "generation.num_slots or generation.max_response_tokens",
    Role.REFERENCE: "reference.micro_batch_tokens",
    Role.ENVIRONMENT: "environment.memory_mb, environment.processes or environment.max_in_flight",
    Role.REWARD: "reward.processes or reward.max_in_flight",
    Role.OBSERVER: "the worker counts in [fleet] on this host",
}


class MemoryKills:
    def __init__(self, *, groups: Path = CONTROL_GROUPS, proc: Path = _PROC) -> None:
        self._proc = proc
        self._groups = _own_groups(groups, proc)
        self._limit_bytes = min([this_machine(groups).memory_bytes, *map(_limit_bytes, self._groups)])
        self._peaks: dict[str, int] = {}
        """Peak resident bytes of each worker."""
        self._counts = self._before = self._read_counts()
        self._explained: dict[str, int] = {}
        """By counter: up to which count kills have explained an exit."""

    def observe(self, beats: Sequence[Worker], pids: Mapping[str, int]) -> None:
        """Record heartbeats and the kill counts so far. ``pids``: this host's workers."""
        there = {beat.who.worker: beat for beat in beats if pids.get(beat.who.worker) == beat.pid}
        self._peaks = {name: max(self._peaks.get(name, 0), beat.rss_bytes) for name, beat in there.items()}
        # the last poll may already have counted the kill behind an exit seen only now
        self._before, self._counts = self._counts, self._read_counts()

    def explain(self, worker: str, role: Role, pid: int, exit_code: int) -> str:
        """Say that the kernel killed a worker for lack of memory, and what to do; "" if it did not.
        ``pid``: 0 on another host."""
        if exit_code != -signal.SIGKILL or not pid:
            return ""
        known = {name: max(count, self._explained.get(name, 0)) for name, count in self._before.items()}
        more = [name for name, count in self._read_counts().items() if count > known.get(name, count)]
        if not more:
            return ""
        self._explained |= {name: known[name] + 1 for name in more}
        others = sorted(((size, name) for name, size in self._peaks.items() if name != worker), reverse=True)[:_NAMED]
        of_others = ", ".join(f"{name} {_gb(size)}" for size, name in others)
        return (
            f"killed by the kernel for lack of memory while it used {_gb(self._peaks.get(worker, 0))}"
            + (f" (others at their peak: {of_others})" if others else "")
            + f"; all processes share {_gb(self._limit_bytes)} ({more[0]})"
            + f"; lower {_REMEDIES[role]}, run fewer workers here, or give them more memory"
        )

    def _read_counts(self) -> dict[str, int]:
        files = [(f"control group {group}", group / name) for group in self._groups for name in _COUNTERS]
        found: dict[str, int] = {}
        for name, path in (*files, ("the host", self._proc / "vmstat")):
            with suppress(OSError, UnicodeDecodeError):
                if match := _COUNT.search(path.read_text(encoding="ascii")):
                    found[name] = int(match[1])
        return found


def _own_groups(groups: Path, proc: Path) -> list[Path]:
    lines: list[str] = []
    with suppress(OSError, UnicodeDecodeError):
        lines = (proc / "self" / "cgroup").read_text(encoding="utf-8").splitlines()
    found: list[Path] = []
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and "memory" not in controllers.split(","):
            continue
        root = groups / "memory" if controllers else groups
        # a container sees its own group as the root group
        found += [
            folder for folder in (root / path.strip("/"), root) if any((folder / name).is_file() for name in _COUNTERS)
        ]
    return list(dict.fromkeys(found))


def _limit_bytes(group: Path) -> int:
    """Return a group's memory limit; a huge number without one."""
    for name in ("memory.max", "memory.limit_in_bytes"):
        with suppress(OSError, ValueError):
            return int((group / name).read_text(encoding="ascii"))
    return sys.maxsize


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:,.0f} MB"
