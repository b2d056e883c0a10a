"""Workers of one run on this host and elsewhere, as one set of processes.

Roles that ``launch.roles`` names are jobs of a launcher; the others are processes of this host. The
plan, the restart budgets, the fences and the watchdog are the same for both. A job's process id
comes from its worker's heartbeats."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pipeline.runtime.registry.contract import Heartbeat
from pipeline.supervisor.launchers.launched import Launched
from pipeline.supervisor.launchers.seam import Exit, Job
from pipeline.supervisor.processes import Command, Processes
from protocol.ids import Role


class FleetProcesses(Processes):
    """The processes of one supervisor, with the jobs of its launcher."""

    def __init__(self, run_dir: Path, command: Command, jobs: Launched, roles: frozenset[str]) -> None:
        super().__init__(run_dir, command)
        self._jobs, self._roles = jobs, roles
        self._beats: Sequence[Heartbeat] = ()

    @property
    def pids(self) -> dict[str, int]:
        """Process ids by worker; 0 for a running job whose worker has no heartbeat yet."""
        return super().pids | self._jobs.pids(self._beats)

    def observe(self, beats: Sequence[Heartbeat]) -> None:
        """Take the process ids of launched workers from their heartbeats."""
        self._beats = beats

    def is_here(self, role: Role) -> bool:
        """Return whether a role's workers are processes of this host."""
        return role not in self._roles

    def start(self, role: Role, name: str) -> None:
        """Start a worker where its role belongs."""
        if role in self._roles:
            self._jobs.start(role, name)
        else:
            super().start(role, name)

    def stop(self, name: str, *, now: bool = False) -> None:
        """Request a worker's drain, or with ``now`` end it, wherever it is."""
        self._jobs.stop(name, now=now)
        super().stop(name, now=now)

    def listing(self) -> dict[str, Job]:
        """Return the workers of this host and the jobs, as they were last seen."""
        return super().listing() | self._jobs.listing()

    def reap(self) -> list[Exit]:
        """Return the workers that ended since the last call, here and elsewhere."""
        return [*super().reap(), *self._jobs.reap()]

    def adopt_jobs(self) -> dict[str, Role]:
        """Hold jobs of earlier supervisors; return their roles by worker. Raises LaunchFailed."""
        return self._jobs.adopt()

    def kill_all(self) -> None:
        """Kill all that is left; jobs are ended by their place."""
        self._jobs.end_all()
        super().kill_all()

    def close(self) -> None:
        """End all that is left, here and elsewhere."""
        self._jobs.close()
        super().close()

    def logs(self, worker: str) -> str:
        """Return the last lines that a worker printed."""
        return super().logs(worker) or self._jobs.logs(worker)
