"""Claims about the launcher of this host: the contract."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.supervisor.launchers.seam import JobState, Launcher
from pipeline.supervisor.processes import Processes
from protocol.ids import Role
from tests.pipeline.supervisor.launchers import stand_in
from tests.pipeline.supervisor.launchers.contract import LauncherContract


class Here:
    """This host."""

    def __init__(self, folder: Path) -> None:
        (folder / "logs").mkdir()
        self._folder = folder
        self._launchers: list[Processes] = []

    def launcher(self) -> Launcher:
        def command(role: Role, folder: Path, name: str) -> list[str]:
            return [sys.executable, stand_in.__file__, str(folder), name]

        self._launchers.append(Processes(self._folder, command))
        return self._launchers[-1]

    def crash(self, worker: str) -> None:
        (self._folder / f"crash-{worker}").touch()

    def lose(self, worker: str) -> None:
        os.kill(json.loads((self._folder / f"given-{worker}").read_text())["pid"], signal.SIGKILL)

    def close(self) -> None:
        for launcher in self._launchers:
            launcher.close()


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Here]:
    here = Here(tmp_path)
    yield here
    here.close()


class TestLocal(LauncherContract):
    """The contract, by processes of this host."""


def test_a_refused_start_is_listed_as_ended_badly(tmp_path: Path) -> None:
    processes = Processes(tmp_path)
    processes.start(Role.REWARD, "reward-0")
    job = processes.listing()["reward-0"]
    assert (job.state, job.exit_code) == (JobState.ENDED, 1)
