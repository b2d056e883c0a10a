"""Claims about the launcher of Ray actors, on a real cluster of several nodes on loopback.

They need an environment with Ray: ``make test-ray``."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.launching import LaunchSection, RaySection, ResourcesSection
from pipeline.supervisor.launchers.join_command import JoinCommand
from pipeline.supervisor.launchers.ray_actors import RayLauncher
from protocol.ids import Role
from tests.pipeline.supervisor.launchers.contract import LauncherContract, until
from tests.pipeline.supervisor.launchers.place_tools import (
    given,
    join_command,
)
from tests.ray.cluster import RayCluster

pytestmark = pytest.mark.filterwarnings("default")
_runs = itertools.count()


class RayPlace:
    """A run of its own in a cluster."""

    def __init__(self, cluster: RayCluster, folder: Path) -> None:
        self.cluster, self.folder = cluster, folder
        self.join: JoinCommand = join_command(folder, f"run-{next(_runs)}")
        self.launchers: list[RayLauncher] = []
        self.fleet: list[tuple[Role, str]] = []
        self.set()

    def set(self, *, generator: ResourcesSection | None = None, **changes: Any) -> None:
        place = RaySection(address=self.cluster.address, **changes)
        self.settings = LaunchSection(
            on="ray", program=self.join.program, ray=place, generator=generator or ResourcesSection()
        )

    def launcher(self) -> RayLauncher:
        self.launchers.append(RayLauncher(self.settings, self.join, self.fleet))
        return self.launchers[-1]

    def crash(self, worker: str) -> None:
        (self.folder / f"crash-{worker}").touch()

    def lose(self, worker: str) -> None:
        os.kill(actor_of(given(self.folder, worker)["pid"]), signal.SIGKILL)

    def close(self) -> None:
        launcher = self.launcher()
        for worker in launcher.listing():
            launcher.stop(worker, now=True)
        for one in self.launchers:
            one.close()


def actor_of(pid: int) -> int:
    """Return the process of the actor that started a worker."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def runs(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


@pytest.fixture
def place(cluster: RayCluster, tmp_path: Path) -> Iterator[RayPlace]:
    found = RayPlace(cluster, tmp_path)
    yield found
    found.close()


def begun(place: RayPlace, worker: str, other_than: int = 0) -> int:
    """Wait for a worker's stand-in; return its process id."""

    def pid() -> int:
        with suppress(OSError):
            found = given(place.folder, worker)["pid"]
            return found if found != other_than and runs(found) else 0
        return 0

    return until(pid)


class TestRay(LauncherContract):
    """The contract, by actors."""
