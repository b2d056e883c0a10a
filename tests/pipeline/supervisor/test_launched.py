"""Claims about launched jobs as a supervisor's loop sees them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pipeline.process.exit_codes import ExitCode
from pipeline.supervisor.launched import FleetProcesses
from pipeline.supervisor.launchers.seam import Job, JobState, LaunchFailed
from pipeline.supervisor.processes import worker_command
from protocol.ids import Role
from tests.pipeline.supervisor.launchers.contract import until


class Cluster:
    """A place in memory, whose answers a test decides."""

    def __init__(self) -> None:
        self.jobs: dict[str, Job] = {}
        self.calls: list[str] = []
        self.refusal = ""
        self.may_start = threading.Event()
        self.may_start.set()
        self.printed = ""

    def _call(self, words: str) -> None:
        self.calls.append(words)
        if self.refusal:
            raise LaunchFailed(self.refusal)

    def start(self, role: Role, worker: str, /) -> None:
        assert self.may_start.wait(60.0)
        self._call(f"start {worker}")
        self.jobs[worker] = Job(role, JobState.RUNNING, "a node")

    def stop(self, worker: str, /, *, now: bool = False) -> None:
        self._call(f"{'end' if now else 'stop'} {worker}")
        self.end(worker, None if now else 0)

    def listing(self) -> dict[str, Job]:
        self._call("list")
        return dict(self.jobs)

    def logs(self, worker: str, /) -> str:
        return self.printed

    def end(self, worker: str, code: int | None) -> None:
        self.jobs[worker] = Job(self.jobs[worker].role, JobState.ENDED, "a node", code)


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


@pytest.fixture
def launched(cluster: Cluster, tmp_path: Path) -> Iterator[FleetProcesses]:
    jobs = FleetProcesses(tmp_path, worker_command, cluster, frozenset({"generator", "reward"}), poll_s=0.02)
    yield jobs
    cluster.refusal = ""
    cluster.may_start.set()
    jobs.close()


def running(launched: FleetProcesses) -> Callable[[], bool]:
    return lambda: launched.running() == ["generator-0"]


def test_a_job_runs_and_its_end_is_reported_once(cluster: Cluster, launched: FleetProcesses) -> None:
    launched.start(Role.GENERATOR, "generator-0")
    until(running(launched))
    cluster.end("generator-0", 7)
    (ended,) = until(launched.reap)
    assert (ended.worker, ended.role, ended.code) == ("generator-0", Role.GENERATOR, 7)
    assert launched.running() == [] and launched.reap() == []


def test_a_start_that_fails_counts_as_a_failure_of_the_surroundings(cluster: Cluster, launched: FleetProcesses) -> None:
    cluster.refusal = "sbatch: error: Unable to contact slurm controller"
    launched.start(Role.GENERATOR, "generator-0")
    (ended,) = until(launched.reap)
    assert ended.code == ExitCode.HOST_FAILED
    assert ended.error is not None and ended.error.may_pass and "slurm controller" in str(ended.error)


@pytest.mark.parametrize("is_forgotten", [True, False])
def test_a_lost_job_counts_as_killed(cluster: Cluster, launched: FleetProcesses, is_forgotten: bool) -> None:
    launched.start(Role.GENERATOR, "generator-0")
    until(running(launched))
    if is_forgotten:
        del cluster.jobs["generator-0"]
    else:
        cluster.end("generator-0", None)
    (ended,) = until(launched.reap)
    assert ended.code == -9


def test_a_place_that_does_not_answer_loses_no_worker(cluster: Cluster, launched: FleetProcesses) -> None:
    launched.start(Role.GENERATOR, "generator-0")
    until(running(launched))
    cluster.refusal = "squeue: error: Connection timed out"
    seen = len(cluster.calls)
    until(lambda: len(cluster.calls) > seen + 2)
    assert launched.reap() == [] and launched.running() == ["generator-0"]


def test_a_stop_that_fails_is_repeated(cluster: Cluster, launched: FleetProcesses) -> None:
    launched.start(Role.GENERATOR, "generator-0")
    until(running(launched))
    cluster.refusal = "scancel: error: Connection timed out"
    launched.stop("generator-0")
    until(lambda: cluster.calls.count("stop generator-0") > 1)
    cluster.refusal = ""
    (ended,) = until(launched.reap)
    assert ended.code == 0


def test_a_worker_that_is_stopped_before_its_start_is_never_started(cluster: Cluster, launched: FleetProcesses) -> None:
    cluster.may_start.clear()
    launched.start(Role.REWARD, "reward-0")
    launched.start(Role.GENERATOR, "generator-0")
    launched.stop("generator-0")
    (ended,) = until(launched.reap)
    assert (ended.worker, ended.code) == ("generator-0", 0)
    cluster.may_start.set()
    until(lambda: launched.running() == ["reward-0"])
    assert "start generator-0" not in cluster.calls


def test_jobs_of_an_earlier_supervisor_are_adopted_unless_they_have_ended(
    cluster: Cluster, launched: FleetProcesses
) -> None:
    for worker in ("generator-0", "generator-1"):
        cluster.start(Role.GENERATOR, worker)
    cluster.end("generator-1", 0)
    assert launched.adopt_jobs() == {"generator-0": Role.GENERATOR}
    cluster.end("generator-0", 3)
    (ended,) = until(launched.reap)
    assert ended.code == 3


def test_closing_ends_what_is_left(cluster: Cluster, launched: FleetProcesses) -> None:
    launched.start(Role.GENERATOR, "generator-0")
    until(running(launched))
    launched.close()
    assert "end generator-0" in cluster.calls


def test_the_error_that_a_job_printed_is_its_error(cluster: Cluster, launched: FleetProcesses) -> None:
    cluster.printed = 'Traceback (most recent call last):\n  File "x.py", line 1\nTypeError: nothing computes 7'
    launched.start(Role.GENERATOR, "generator-0")
    until(running(launched))
    cluster.end("generator-0", 1)
    (ended,) = until(launched.reap)
    assert ended.error is not None and ended.error.identity == "TypeError: nothing computes #"
