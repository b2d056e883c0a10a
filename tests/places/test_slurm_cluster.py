"""Claims about the launcher of Slurm jobs, on a cluster of one host that Slurm itself runs.

They need Slurm's programs: ``apt-get install slurmctld slurmd slurm-client munge``."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.config.operations import LaunchSection, SlurmSection
from pipeline.supervisor.launchers.seam import JobState, LaunchFailed
from pipeline.supervisor.launchers.slurm import SlurmLauncher, job_name
from protocol.ids import Role
from tests.pipeline.supervisor.launchers.contract import FarLauncherContract, until, until_state
from tests.pipeline.supervisor.launchers.place_tools import (
    SECRET,
    assert_no_secret_but_in_a_private_file,
    given,
    join_command,
)
from tests.places.slurm_cluster import PROGRAMS, missing, says, slurm_cluster

pytestmark = pytest.mark.skipif(bool(missing()), reason=f"Slurm's programs are not installed: {', '.join(missing())}")


class RealPlace:
    """The cluster's one node."""

    programs = PROGRAMS[3:]

    def __init__(self, folder: Path, run: str) -> None:
        self.folder, self.run = folder, run
        self.settings = LaunchSection(slurm=SlurmSection(folder=folder / "shared"))

    def launcher(self) -> SlurmLauncher:
        return SlurmLauncher(self.settings, join_command(self.folder, self.run))

    def set_answer_s(self, limit_s: float) -> None:
        self.settings = self.settings.model_copy(update={"answer_s": limit_s})

    def crash(self, worker: str) -> None:
        (self.folder / f"crash-{worker}").touch()

    def lose(self, worker: str) -> None:
        """Have Slurm count the node as down, and then as back."""
        assert worker
        self._node("State=DOWN", "Reason=lost")

        def is_back() -> bool:
            # The node may have come back by itself, and is not resumed twice.
            self._node("State=RESUME")
            return says(["sinfo", "--noheader", "--format=%T"]) in {"idle", "mixed", "allocated"}

        until(is_back)

    def _node(self, *change: str) -> None:
        node = socket.gethostname().partition(".")[0]
        subprocess.run(["scontrol", "update", f"NodeName={node}", *change], check=False, timeout=20)


@pytest.fixture(scope="module")
def configuration(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with slurm_cluster(tmp_path_factory.mktemp("slurm")) as found:
        yield found


@pytest.fixture
def place(
    configuration: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[RealPlace]:
    monkeypatch.setenv("SLURM_CONF", str(configuration))
    run = f"run{abs(hash(request.node.name)) % 10**8}"
    yield RealPlace(tmp_path, run)
    monkeypatch.undo()
    environment = os.environ | {"SLURM_CONF": str(configuration)}
    names = [job_name(run, f"{role}-{number}") for role in ("generator", "reward") for number in range(3)]
    subprocess.run(
        ["scancel", "--signal=KILL", "--full", f"--name={','.join(names)}"], env=environment, check=True, timeout=20
    )


class TestSlurmItself(FarLauncherContract):
    """The contract, by jobs of a real cluster."""


def test_a_job_that_no_node_can_take_yet_waits_with_slurms_reason(place: RealPlace) -> None:
    place.settings = place.settings.model_copy(update={"slurm": SlurmSection(folder=place.folder, options=("--hold",))})
    launcher = place.launcher()
    launcher.start(Role.REWARD, "reward-0")
    job = until_state(launcher, "reward-0", JobState.WAITING)
    assert job.reason == "JobHeldUser"
    launcher.stop("reward-0")
    until_state(launcher, "reward-0", JobState.ENDED)


def test_slurm_never_holds_the_tokens_secret(place: RealPlace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDIS_URL", "redis://:ledger-password@127.0.0.1:1/0")
    launcher = place.launcher()
    launcher.start(Role.GENERATOR, "generator-0")
    until(lambda: "begun" in launcher.logs("generator-0"))
    assert_no_secret_but_in_a_private_file(place.folder, "generator-0")
    shown = subprocess.run(["scontrol", "show", "job"], capture_output=True, text=True, check=True, timeout=20).stdout
    assert job_name(place.run, "generator-0") in shown and SECRET not in shown


def test_a_refusal_is_told_in_slurms_own_words(place: RealPlace) -> None:
    place.settings = place.settings.model_copy(
        update={"slurm": SlurmSection(folder=place.folder, options=("--partition=none",))}
    )
    with pytest.raises(LaunchFailed, match="sbatch failed with code 1: sbatch: error: invalid partition"):
        place.launcher().start(Role.GENERATOR, "generator-0")


def test_a_worker_that_a_signal_killed_counts_as_killed_and_not_as_failed(place: RealPlace) -> None:
    launcher = place.launcher()
    launcher.start(Role.GENERATOR, "generator-0")
    until(lambda: "begun" in launcher.logs("generator-0"))
    os.kill(given(place.folder, "generator-0")["pid"], signal.SIGKILL)
    assert until_state(launcher, "generator-0", JobState.ENDED).exit_code == -signal.SIGKILL
