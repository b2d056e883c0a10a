"""The interface of launchers, which start, stop and list jobs elsewhere and return their logs.

A job is one worker on some *place*: a host, a Slurm job, a pod, a Ray actor. The supervisor's plan
decides which jobs exist; a launcher only carries that out. Its calls may take seconds, since some
run external programs. One contract suite tests all launchers.

``pipeline.supervisor.processes`` starts workers on this host itself; launchers start ``headrace
fleet join`` elsewhere. Workers have the plan's names everywhere, so if two jobs have the same name,
the later one fences the earlier."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from pipeline.process.exit_codes import LastError
from protocol.errors import HeadraceError
from protocol.ids import Role


class LaunchFailed(HeadraceError, OSError):
    """A launcher could not start, stop or list jobs. A retry may succeed."""


class JobState(StrEnum):
    WAITING = "waiting"
    """In a queue, for a node."""
    RUNNING = "running"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class Job:
    role: Role
    state: JobState
    place: str
    """Where it runs, in words: a host, a node, a job number."""
    exit_code: int | None = None
    """Once ended; negative for a signal, None if the place lost it."""
    reason: str = ""
    """Why it waits or how it ended, in the place's words."""


@dataclass(frozen=True, slots=True)
class Exit:
    worker: str
    role: Role
    pid: int
    """0 on another host."""
    code: int
    """Negative for a signal."""
    error: LastError | None = None
    """The error that it recorded or printed."""
    delivered: int = 0


class Launcher(Protocol):
    """Starts jobs on one kind of place. All calls raise LaunchFailed if it does not answer."""

    def start(self, role: Role, worker: str, /) -> None:
        """Start a worker, replacing an ended job of the same name."""
        ...

    def stop(self, worker: str, /, *, now: bool = False) -> None:
        """Ask a worker to drain and end, or with ``now`` kill it. Does nothing if there is none."""
        ...

    def listing(self) -> dict[str, Job]:
        """Return the run's jobs by worker, including those of earlier supervisors, and ended ones
        until the place forgets them."""
        ...

    def logs(self, worker: str, /) -> str:
        """Return the last lines that a job printed; empty without any."""
        ...


class ConfiguredLauncher(Launcher, Protocol):
    """What ``launch.on`` names."""

    def reach(self) -> None:
        """Connect once, before the run is checked. Raises ConfigError: the place cannot be used."""

    def clear(self, logs: Path, /) -> None:
        """Remove what ended jobs left on this host, and save in ``logs`` what they printed."""
