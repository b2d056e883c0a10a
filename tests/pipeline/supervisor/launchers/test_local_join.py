"""Claims about joined workers of the run's own host: the contract, with stand-ins for joins."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from pipeline.config.operations import LaunchSection
from pipeline.process.records import process_runs
from pipeline.supervisor.launchers.build import dry_run, end_jobs, launcher_of
from pipeline.supervisor.launchers.hosts import LocalJoinLauncher, state_folder
from pipeline.supervisor.launchers.seam import JobState
from protocol.errors import ConfigError
from protocol.ids import Role
from tests.pipeline.supervisor.launchers import stand_in
from tests.pipeline.supervisor.launchers.contract import LauncherContract, start_and_die, until, until_state
from tests.pipeline.supervisor.launchers.place_tools import (
    assert_no_secret_but_in_a_private_file,
    given,
    join_command,
)


class HerePlace:
    """This host, with jobs in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.state, self.logs = folder, folder / "state", folder / "logs"
        self.logs.mkdir()
        self.launchers: list[LocalJoinLauncher] = []

    def launcher(self) -> LocalJoinLauncher:
        program = (sys.executable, stand_in.__file__, str(self.folder))
        join = join_command(self.folder)
        # the ledger's address is known only once the run has begun
        launcher = LocalJoinLauncher(replace(join, url=""), self.state, lambda: join.url, program)
        self.launchers.append(launcher)
        return launcher

    def crash(self, worker: str) -> None:
        (self.folder / f"crash-{worker}").touch()

    def lose(self, worker: str) -> None:
        for path in self.state.glob(f"headrace/launched/*/{worker}.json"):
            with suppress(ProcessLookupError):
                os.killpg(msgspec.json.decode(path.read_bytes())["identity"]["pid"], signal.SIGKILL)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[HerePlace]:
    found = HerePlace(tmp_path)
    yield found
    found.lose("*")
    for launcher in found.launchers:
        launcher.clear(found.logs)
        assert not found.state.exists()


class TestHere(LauncherContract):
    """The contract, by jobs of this host."""


def test_a_joined_worker_of_this_host_gets_its_token_by_a_private_file_alone(
    place: HerePlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REDIS_URL", "redis://:ledger-password@127.0.0.1:1/0")
    place.launcher().start(Role.GENERATOR, "generator-0")
    until_state(place.launcher(), "generator-0", JobState.RUNNING)
    until((place.folder / "given-generator-0").exists)
    assert_no_secret_but_in_a_private_file(place.folder, "generator-0")
    found = given(place.folder, "generator-0")
    assert found["environment"]["XDG_STATE_HOME"] == str(place.state)
    assert join_command(place.folder).url in found["arguments"]


def test_ended_jobs_leave_no_folder_and_no_process_and_what_they_printed_stays(place: HerePlace) -> None:
    launcher = place.launcher()
    for worker in ("generator-0", "reward-0"):
        launcher.start(Role(worker.partition("-")[0]), worker)
        until(lambda worker=worker: f"begun {worker}" in launcher.logs(worker))
    pids = [given(place.folder, worker)["pid"] for worker in ("generator-0", "reward-0")]
    launcher.stop("generator-0")
    launcher.stop("reward-0", now=True)
    launcher.clear(place.logs)
    assert not place.state.exists()
    # The kernel takes a moment to end a killed process.
    until(lambda: not any(map(process_runs, pids)))
    assert "drained generator-0" in (place.logs / "join-generator-0.out").read_text()
    assert "begun reward-0" in (place.logs / "join-reward-0.out").read_text()


def test_a_job_that_still_runs_keeps_its_folder(place: HerePlace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.supervisor.launchers.hosts._END_S", 0.1)
    place.launcher().start(Role.GENERATOR, "generator-0")
    later = place.launcher()
    until(lambda: "begun generator-0" in later.logs("generator-0"))
    later.clear(place.logs)
    assert later.listing()["generator-0"].state is JobState.RUNNING


def test_down_without_a_supervisor_ends_joined_workers_and_removes_their_folders(
    place: HerePlace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.pipeline.op_config import op_config

    start_and_die(place, "generator-0")
    until(lambda: "begun generator-0" in place.launcher().logs("generator-0"))
    monkeypatch.setattr("pipeline.supervisor.launchers.build.launcher_of", lambda *_: place.launcher())
    assert end_jobs(op_config(tmp_path), tmp_path) == 1
    assert not place.state.exists()
    assert "begun generator-0" in (tmp_path / "logs" / "join-generator-0.out").read_text()


def test_a_run_that_takes_no_links_by_tcp_has_no_joined_workers(tmp_path: Path) -> None:
    from tests.pipeline.op_config import op_config

    with pytest.raises(ConfigError, match=r"set wire\.transport to tcp"):
        launcher_of(op_config(tmp_path, "launch.on=join"), tmp_path)
    config = op_config(tmp_path, "launch.on=join", "wire.transport=tcp")
    assert isinstance(launcher_of(config, tmp_path), LocalJoinLauncher)
    assert dry_run(config).startswith("# joined workers of this host: generator-0")
    assert not config.launch.elsewhere, "they count as workers of this host"
    assert LaunchSection(on="ssh").elsewhere == {"generator", "reward", "reference", "environment"}


def test_runs_of_one_name_in_different_folders_have_different_jobs(tmp_path: Path) -> None:
    assert state_folder(tmp_path / "a" / "run") != state_folder(tmp_path / "b" / "run")
