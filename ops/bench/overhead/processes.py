"""Processor seconds of a whole fleet by role, read from outside.

A role's time is user and system time of its workers and of all processes below them, of those that
have ended too. A process without a role of its own counts for the nearest process above it that
has one. Linux alone has these numbers, in /proc."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import redis

from ops.bench.overhead.fleet import between
from pipeline.flow.fleet import role_by_name
from pipeline.ledger.address import read_address
from pipeline.ledger.redis import keys
from pipeline.supervisor.run_folder import supervisor_pid

if TYPE_CHECKING:
    from pipeline.config.schema import RunConfig

SUPERVISOR: Final = "supervisor"
SERVER: Final = "ledger server"
_EVERY_S: Final = 2.0
_ANSWER_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class ProcessTime:
    """One process."""

    parent: int
    seconds: float
    """Of processor time, its own and that of its ended children."""


def by_role(processes: Mapping[int, ProcessTime], roles: Mapping[int, str]) -> dict[str, float]:
    """Return processor seconds by role. ``roles``: those that processes have of their own, by
    pid."""
    spent = dict.fromkeys(roles.values(), 0.0)
    for pid, process in processes.items():
        at, passed = pid, set[int]()
        while at not in roles and at in processes and at not in passed:
            passed.add(at)
            at = processes[at].parent
        if at in roles:
            spent[roles[at]] += process.seconds
    return spent


def all_processes(proc: Path = Path("/proc")) -> dict[int, ProcessTime]:
    """Return the processes of this machine by pid."""
    ticks, found = os.sysconf("SC_CLK_TCK"), dict[int, ProcessTime]()
    for entry in proc.iterdir():
        if not entry.name.isdecimal():
            continue
        # a process may end meanwhile
        with suppress(OSError, IndexError):
            cells = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
            found[int(entry.name)] = ProcessTime(int(cells[1]), sum(map(int, cells[11:15])) / ticks)
    return found


@dataclass(slots=True)
class FleetProcesses:
    """Looks at a run's processes every two seconds, as long as all its workers are there."""

    config: RunConfig
    looks: list[tuple[float, dict[str, float]]] = field(default_factory=list[tuple[float, dict[str, float]]])
    """Wall-clock time, and processor seconds by role."""
    workers: dict[str, int] = field(default_factory=dict[str, int])
    """Newest process of each worker that was seen."""
    _next_s: float = 0.0
    _client: redis.Redis | None = None

    def look(self) -> None:
        """Take one look when it is time."""
        now_s = time.time()
        if now_s < self._next_s:
            return
        self._next_s = now_s + _EVERY_S
        address = read_address(self.config.run_dir)
        supervisor = supervisor_pid(self.config.run_dir) if address is not None else None
        if address is None or not supervisor:
            return
        with suppress(redis.RedisError):
            self._client = self._client or redis.Redis.from_url(address.url, socket_timeout=_ANSWER_S)
            beats: Any = self._client.hgetall(keys.heartbeats(self.config.run.name))
            self.workers |= {worker.decode(): json.loads(beat)["pid"] for worker, beat in beats.items()}
        processes = all_processes()
        if not processes.keys() >= set(self.workers.values()):
            # an ended worker's whole time is its parent's from here on, and would count twice
            return
        roles = {pid: role_by_name(worker) for worker, pid in self.workers.items()}
        roles |= {supervisor: SUPERVISOR} | ({address.pid: SERVER} if address.pid else {})
        self.looks.append((time.time(), by_role(processes, roles)))


def spent_between(looks: Sequence[tuple[float, Mapping[str, float]]], begin_s: float, end_s: float) -> dict[str, float]:
    """Return processor seconds by role between two times, interpolated between looks."""
    roles = dict.fromkeys(role for _, spent in looks for role in spent)
    return {
        role: between([(at_s, spent[role]) for at_s, spent in looks if role in spent], begin_s, end_s) for role in roles
    }
