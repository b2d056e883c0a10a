"""The contract of launchers, on a place of each kind with programs that stand in for workers.

A stand-in worker writes ``begun NAME`` and waits. SIGTERM ends it with code 0 after ``drained
NAME``. A file ``crash-NAME`` in the place's folder makes it end with code 7."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import pytest

from pipeline.supervisor.launched import FleetProcesses
from pipeline.supervisor.launchers.build import end_all
from pipeline.supervisor.launchers.seam import Job, JobState, Launcher, LaunchFailed
from pipeline.supervisor.processes import worker_command
from protocol.ids import Role
from tests.pipeline.supervisor.launchers.place_tools import put_on_path

LIMIT_S = 60.0


class Place(Protocol):
    """A kind of place, with a launcher."""

    def launcher(self) -> Launcher:
        """Return a launcher; a second one is that of a later supervisor."""
        ...

    def crash(self, worker: str) -> None:
        """Make a running stand-in end with code 7."""
        ...

    def lose(self, worker: str) -> None:
        """Kill a running stand-in with all around it, as when its host is lost."""
        ...


class FarPlace(Place, Protocol):
    """A place that is reached by programs, whose jobs outlive a supervisor."""

    programs: tuple[str, ...]

    def set_answer_s(self, limit_s: float) -> None:
        """Set the limit of a call of the place's programs."""
        ...


def until(condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + LIMIT_S
    while not (value := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return value


def until_state(launcher: Launcher, worker: str, state: JobState) -> Job:
    def seen() -> Job | None:
        job = launcher.listing().get(worker)
        return job if job is not None and job.state is state else None

    return until(seen)


def until_gone(launcher: Launcher, worker: str) -> None:
    """Wait until a worker is listed as ended badly, or no longer: its place may have lost it."""

    def is_gone() -> bool:
        job = launcher.listing().get(worker)
        return job is None or (job.state is JobState.ENDED and job.exit_code != 0)

    until(is_gone)


class LauncherContract:
    """Claims about every launcher. A subclass gives the fixture ``place``."""

    def test_a_started_worker_is_listed_as_running_with_its_role_and_place(self, place: Place) -> None:
        launcher = place.launcher()
        assert launcher.listing() == {}
        launcher.start(Role.REWARD, "reward-0")
        job = until_state(launcher, "reward-0", JobState.RUNNING)
        assert job.role is Role.REWARD and job.place and job.exit_code is None

    def test_a_stopped_worker_drains_and_is_listed_as_ended_well(self, place: Place) -> None:
        launcher = place.launcher()
        launcher.start(Role.GENERATOR, "generator-0")
        launcher.start(Role.GENERATOR, "generator-1")
        for worker in ("generator-0", "generator-1"):
            until(lambda worker=worker: f"begun {worker}" in launcher.logs(worker))
        launcher.stop("generator-1")
        assert until_state(launcher, "generator-1", JobState.ENDED).exit_code == 0
        assert "drained generator-1" in launcher.logs("generator-1")
        assert launcher.listing()["generator-0"].state is JobState.RUNNING
        launcher.stop("generator-7")

    def test_a_crash_is_listed_with_its_exit_code_and_its_last_words(self, place: Place) -> None:
        launcher = place.launcher()
        launcher.start(Role.GENERATOR, "generator-0")
        until(lambda: "begun generator-0" in launcher.logs("generator-0"))
        place.crash("generator-0")
        assert until_state(launcher, "generator-0", JobState.ENDED).exit_code == 7
        assert "crashed generator-0" in launcher.logs("generator-0")

    def test_a_worker_that_is_ended_at_once_does_not_drain(self, place: Place) -> None:
        launcher = place.launcher()
        launcher.start(Role.GENERATOR, "generator-0")
        until(lambda: "begun generator-0" in launcher.logs("generator-0"))
        launcher.stop("generator-0", now=True)
        until_gone(launcher, "generator-0")
        assert "drained" not in launcher.logs("generator-0")

    def test_a_lost_worker_is_listed_as_ended_badly_or_no_longer(self, place: Place) -> None:
        launcher = place.launcher()
        launcher.start(Role.GENERATOR, "generator-0")
        until(lambda: "begun generator-0" in launcher.logs("generator-0"))
        place.lose("generator-0")
        until_gone(launcher, "generator-0")

    def test_an_ended_worker_can_be_started_again(self, place: Place) -> None:
        launcher = place.launcher()
        launcher.start(Role.GENERATOR, "generator-0")
        until(lambda: "begun generator-0" in launcher.logs("generator-0"))
        place.crash("generator-0")
        until_state(launcher, "generator-0", JobState.ENDED)
        launcher.start(Role.GENERATOR, "generator-0")
        until_state(launcher, "generator-0", JobState.RUNNING)


class FarLauncherContract(LauncherContract):
    """Claims about launchers of other hosts. A subclass gives the fixture ``place``."""

    def test_jobs_of_a_killed_supervisor_are_adopted_with_their_ends_and_lines(
        self, place: FarPlace, tmp_path: Path
    ) -> None:
        start_and_die(place, "generator-0", "generator-1")
        adopted = FleetProcesses(tmp_path, worker_command, place.launcher(), frozenset(), poll_s=0.05)
        assert adopted.adopt_jobs() == {"generator-0": Role.GENERATOR, "generator-1": Role.GENERATOR}
        until(lambda: "begun generator-0" in adopted.logs("generator-0"))
        until(lambda: "begun generator-1" in adopted.logs("generator-1"))
        adopted.stop("generator-1")
        ended = until(adopted.reap)
        assert [(exit_.worker, exit_.code) for exit_ in ended] == [("generator-1", 0)]
        assert "drained generator-1" in adopted.logs("generator-1")
        place.crash("generator-0")
        ended = until(adopted.reap)
        assert [(exit_.worker, exit_.code) for exit_ in ended] == [("generator-0", 7)]
        assert "crashed generator-0" in adopted.logs("generator-0")
        adopted.close()

    def test_jobs_without_a_supervisor_are_ended_and_counted(self, place: FarPlace) -> None:
        start_and_die(place, "generator-0", "reward-0")
        for worker in ("generator-0", "reward-0"):
            until(lambda worker=worker: f"begun {worker}" in place.launcher().logs(worker))
        place.crash("reward-0")
        until_state(place.launcher(), "reward-0", JobState.ENDED)
        assert end_all(place.launcher()) == 1
        until_gone(place.launcher(), "generator-0")
        assert "drained" not in place.launcher().logs("generator-0")
        assert end_all(place.launcher()) == 0

    def test_a_place_whose_programs_hang_fails_at_its_deadline(
        self, place: FarPlace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        put_on_path(tmp_path / "hung", dict.fromkeys(place.programs, ("sh", "-c", "'sleep 60'")), monkeypatch)
        place.set_answer_s(0.2)
        launcher = place.launcher()
        for ask in (launcher.listing, lambda: launcher.start(Role.REWARD, "reward-0")):
            with pytest.raises(LaunchFailed, match=r"gave no answer within 0\.2 s"):
                ask()


def start_and_die(place: Place, *workers: str) -> None:
    """Start workers in a process that is then killed, as a supervisor may be."""
    pid = os.fork()
    if pid == 0:
        try:
            launcher = place.launcher()
            for worker in workers:
                launcher.start(Role(worker.partition("-")[0]), worker)
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
