"""Claims about the launcher of Slurm jobs: the contract, on a stand-in for Slurm's programs that
keeps to their documented interface. ``tests/places`` has it on a real cluster."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from pipeline.config.operations import LaunchSection, ResourcesSection, SlurmSection
from pipeline.supervisor.launchers.seam import JobState, LaunchFailed
from pipeline.supervisor.launchers.slurm import SlurmLauncher, job_script
from protocol.errors import ConfigError
from protocol.ids import Role
from tests.pipeline.supervisor.launchers import slurm_stand_in
from tests.pipeline.supervisor.launchers.contract import FarLauncherContract, until, until_state
from tests.pipeline.supervisor.launchers.place_tools import (
    SECRET,
    assert_no_secret_but_in_a_private_file,
    given,
    join_command,
    put_on_path,
)
from tests.pipeline.supervisor.launchers.slurm_stand_in import Cluster


class SlurmPlace:
    """A stand-in for a cluster."""

    programs = ("sbatch", "srun", "scancel", "squeue", "scontrol")

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.cluster = Cluster(folder / "cluster")
        self.cluster.folder.mkdir()
        self.settings = LaunchSection(slurm=SlurmSection(folder=folder / "shared"))

    def launcher(self) -> SlurmLauncher:
        return SlurmLauncher(self.settings, join_command(self.folder))

    def set_answer_s(self, limit_s: float) -> None:
        self.settings = self.settings.model_copy(update={"answer_s": limit_s})

    def crash(self, worker: str) -> None:
        (self.folder / f"crash-{worker}").touch()

    def lose(self, worker: str) -> None:
        for number in self.cluster.numbers():
            job = self.cluster.job(number)
            if job["name"].endswith(worker):
                self.cluster.write(number, state="NODE_FAIL", code="0:0")
                os.killpg(job["script_pid"], signal.SIGKILL)

    def close(self) -> None:
        for number in self.cluster.numbers():
            with suppress(ProcessLookupError, KeyError):
                os.killpg(self.cluster.job(number)["script_pid"], signal.SIGKILL)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlurmPlace]:
    found = SlurmPlace(tmp_path)
    words = (sys.executable, slurm_stand_in.__file__, str(found.cluster.folder))
    put_on_path(tmp_path / "bin", {name: (*words, name) for name in found.programs}, monkeypatch)
    yield found
    found.close()


class TestSlurm(FarLauncherContract):
    """The contract, by jobs."""


def test_a_waiting_job_is_listed_with_its_reason_and_can_be_cancelled(place: SlurmPlace) -> None:
    (place.cluster.folder / "hold").touch()
    launcher = place.launcher()
    launcher.start(Role.REWARD, "reward-0")
    job = launcher.listing()["reward-0"]
    assert (job.state, job.reason) == (JobState.WAITING, "Resources")
    launcher.stop("reward-0")
    assert launcher.listing()["reward-0"].state is JobState.ENDED


def test_a_later_supervisor_finds_the_jobs_of_its_run_alone(place: SlurmPlace) -> None:
    place.launcher().start(Role.GENERATOR, "generator-0")
    other = SlurmLauncher(place.settings, join_command(place.folder, run="demo.2"))
    other.start(Role.GENERATOR, "generator-1")
    assert list(place.launcher().listing()) == ["generator-0"]
    assert list(other.listing()) == ["generator-1"]


def test_a_job_gets_its_token_by_a_private_file_alone(place: SlurmPlace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDIS_URL", "redis://:ledger-password@127.0.0.1:1/0")
    launcher = place.launcher()
    launcher.start(Role.GENERATOR, "generator-0")
    until(lambda: "begun" in launcher.logs("generator-0"))
    assert_no_secret_but_in_a_private_file(place.folder, "generator-0")
    (number,) = place.cluster.numbers()
    assert SECRET not in json.dumps(place.cluster.job(number))


def test_a_script_requests_what_a_worker_needs_and_is_never_requeued(tmp_path: Path) -> None:
    settings = LaunchSection(
        generator=ResourcesSection(cpus=8, gpus=2, memory_gb=64),
        slurm=SlurmSection(folder=tmp_path / "a folder", options=("--partition=gpu", "--account=a b")),
    )
    script = job_script(settings, join_command(tmp_path), Role.GENERATOR, "generator-3")
    lines = script.splitlines()
    assert lines[0] == "#!/bin/bash" and lines[1] == "#SBATCH --job-name=headrace.demo.generator-3"
    for option in (
        "--cpus-per-task=8",
        "--gres=gpu:2",
        "--mem=64G",
        "--no-requeue",
        "--partition=gpu",
        "'--account=a b'",
    ):
        assert f"#SBATCH {option}" in lines
    assert lines[-1].startswith("exec srun --ntasks=1 ") and "--role generator --name generator-3" in lines[-1]
    assert SECRET not in script


def test_a_refusal_is_told_in_slurms_words(place: SlurmPlace) -> None:
    settings = place.settings.model_copy(
        update={"slurm": SlurmSection(folder=place.folder, options=("--patrition=x",))}
    )
    launcher = SlurmLauncher(settings, join_command(place.folder))
    with pytest.raises(LaunchFailed, match="sbatch failed with code 1: sbatch: unrecognized option '--patrition=x'"):
        launcher.start(Role.GENERATOR, "generator-0")


def test_a_host_without_sbatch_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"launch\.on is slurm, but there is no sbatch on PATH"):
        SlurmLauncher(LaunchSection(), join_command(tmp_path))


def test_an_ended_jobs_exit_code_outlives_slurms_memory_of_it(place: SlurmPlace) -> None:
    launcher = place.launcher()
    launcher.start(Role.GENERATOR, "generator-0")
    until(lambda: "begun" in launcher.logs("generator-0"))
    place.crash("generator-0")
    until_state(launcher, "generator-0", JobState.ENDED)
    (number,) = place.cluster.numbers()
    place.cluster.write(number, code="")
    assert launcher.listing()["generator-0"].exit_code == 7
    assert place.launcher().listing()["generator-0"].exit_code is None


def test_a_worker_that_a_signal_killed_counts_as_killed_and_not_as_failed(place: SlurmPlace) -> None:
    launcher = place.launcher()
    launcher.start(Role.GENERATOR, "generator-0")
    until(lambda: "begun" in launcher.logs("generator-0"))
    os.kill(given(place.folder, "generator-0")["pid"], signal.SIGKILL)
    assert until_state(launcher, "generator-0", JobState.ENDED).exit_code == -signal.SIGKILL
