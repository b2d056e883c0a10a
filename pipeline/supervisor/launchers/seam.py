"""The seam of launchers, which start, stop and list jobs, and return their logs.

A job is one worker, started on a place by this host. The supervisor's plan decides which jobs there
are; a launcher only carries that out. Its calls may take seconds, since some run a program of the
place. One contract suite tests all launchers.

``pipeline.supervisor.processes`` is the launcher of this host. The others start
``headrace fleet join`` on their place. A worker's name is that of the plan everywhere, so that of two
jobs of one name the later fences the earlier."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from pipeline.process.exit_codes import LastError
from protocol.errors import HeadraceError
from protocol.ids import Role


class LaunchFailed(HeadraceError, OSError):
    """A place does not start, stop or list jobs. A repeat may succeed."""


class JobState(StrEnum):
    """State of a job, as its place knows it."""

    WAITING = "waiting"
    """For a node, in the place's queue."""
    RUNNING = "running"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class Job:
    """One worker on a place."""

    role: Role
    state: JobState
    place: str
    """Where it runs, in words: a host, a node, a job's number."""
    exit_code: int | None = None
    """Of an ended job; negative for the signal that killed it, None when its place lost it."""
    reason: str = ""
    """Why it waits or how it ended, in the place's words."""


@dataclass(frozen=True, slots=True)
class Exit:
    """An ended worker."""

    worker: str
    role: Role
    pid: int
    """0 on another host."""
    code: int
    """Negative for the signal that killed it."""
    error: LastError | None = None
    """The error that it wrote down or printed."""
    delivered: int = 0


class Launcher(Protocol):
    """Starts jobs on one kind of place. All calls raise LaunchFailed when it does not answer."""

    def start(self, role: Role, worker: str, /) -> None:
        """Start a worker. An ended job of the same name is forgotten."""
        ...

    def stop(self, worker: str, /, *, now: bool = False) -> None:
        """Ask a worker to drain and end, or with ``now`` end it at once. An absent one is left."""
        ...

    def listing(self) -> dict[str, Job]:
        """Return the jobs of this run by worker, those of earlier supervisors too. An ended job is
        among them until its place forgets it."""
        ...

    def logs(self, worker: str, /) -> str:
        """Return the last lines that a job printed; empty without any."""
        ...
