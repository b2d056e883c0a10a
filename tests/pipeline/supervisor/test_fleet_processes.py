"""Claims about a supervisor whose generators a launcher starts: the rules are those of processes of
this host. The launcher here starts real workers, in a folder of its own."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import threading
from pathlib import Path

import pytest

from pipeline.fleet.status import RunSnapshot
from pipeline.ledger.address import read_ledger_url
from pipeline.ledger.redis.client import connect
from pipeline.ledger.token import read_token
from pipeline.preflight.checks import preflight
from pipeline.process.exit_codes import ExitCode
from pipeline.runtime.registry.contract import Fleet, RunState
from pipeline.runtime.registry.redis import RedisRegistry
from pipeline.supervisor import host_fleet
from pipeline.supervisor.launchers.seam import JobState
from pipeline.supervisor.processes import Processes
from pipeline.supervisor.supervisor import Supervisor
from protocol.ids import Role
from tests.pipeline.supervisor.supervised import Run

pytestmark = pytest.mark.timeout(90)
ELSEWHERE = ("launch.on=slurm", 'launch.roles=["generator"]', "launch.poll_s=0.1")


class LaunchedRun(Run):
    """A run whose generators are started elsewhere."""

    def __init__(self, folder: Path, *overrides: str, **scripts: str) -> None:
        super().__init__(folder, *ELSEWHERE, *overrides, resume=False, **scripts)
        place = folder / "elsewhere"
        (place / "logs").mkdir(parents=True)
        self.place = Processes(place, lambda role, _, name: self._command(role, self.run_dir, name))
        self.supervisor = Supervisor(
            self.config, self.run_dir, preflight(self.config).spec, command=self._command, launcher=self.place
        )

    def state(self, worker: str) -> JobState | None:
        job = self.place.listing().get(worker)
        return None if job is None else job.state


def workers(snapshot: RunSnapshot) -> list[str]:
    return sorted(beat.who.worker for beat in snapshot.workers)


def test_launched_workers_have_tokens_and_are_part_of_the_fleet_that_drains(tmp_path: Path) -> None:
    run = LaunchedRun(tmp_path)
    seen: list[str] = []

    def look(snapshot: RunSnapshot) -> None:
        seen[:] = workers(snapshot)
        run.interrupt(snapshot)

    run.when_live(look)
    assert run.until_end().exit_code == ExitCode.OK
    assert seen == ["generator-0", "learner", "reward-0"]
    assert run.state("generator-0") is JobState.ENDED
    assert not (run.run_dir / "logs" / "generator-0.out").exists()
    path = run.run_dir / "tokens" / "generator.token"
    token = read_token(path)
    assert (token.run, token.role) == (run.config.run.name, Role.GENERATOR)
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert [one.name for one in path.parent.iterdir()] == ["generator.token"]


def test_a_killed_launched_worker_is_started_again_as_a_newer_incarnation(tmp_path: Path) -> None:
    run = LaunchedRun(tmp_path)
    first: list[int] = []
    epochs: list[int] = []

    def kill(snapshot: RunSnapshot) -> None:
        (beat,) = (beat for beat in snapshot.workers if beat.who.worker == "generator-0")
        first.append(beat.pid)
        os.kill(beat.pid, signal.SIGKILL)
        run.react = until_back

    def until_back(snapshot: RunSnapshot) -> None:
        again = [beat for beat in snapshot.workers if beat.who.worker == "generator-0" and beat.pid not in first]
        if again:
            epochs.append(again[0].who.epoch)
            run.interrupt(snapshot)

    run.when_live(kill)
    assert run.until_end().exit_code == ExitCode.OK
    assert epochs and epochs[0] > 1


def test_the_restart_budget_holds_for_launched_workers(tmp_path: Path) -> None:
    run = LaunchedRun(tmp_path, "supervisor.max_data_failures=1", "supervisor.backoff_s=0.05", generator="crash")
    outcome = run.until_end()
    assert outcome.status.state is RunState.FAILED
    assert outcome.failure is not None and outcome.failure.worker == "generator-0"
    assert "2 data failures" in outcome.failure.reason
    assert "the last words of a crash" in outcome.last_lines


def test_scaling_starts_and_drains_launched_workers(tmp_path: Path) -> None:
    run = LaunchedRun(tmp_path)
    asked: list[int] = []

    def want(count: int) -> None:
        async def set_fleet() -> None:
            registry = RedisRegistry(connect(read_ledger_url(run.run_dir)), run.config.run.name)
            fleet = await registry.fleet()
            assert fleet is not None
            await registry.set_fleet(Fleet({**fleet.counts, Role.GENERATOR: count}))
            await registry.aclose()

        asked.append(count)
        thread = threading.Thread(target=lambda: asyncio.run(set_fleet()))
        thread.start()
        thread.join()

    def react(snapshot: RunSnapshot) -> None:
        names = workers(snapshot)
        if not asked and "generator-0" in names:
            want(3)
        elif asked == [3] and "generator-2" in names:
            want(1)
        elif asked == [3, 1] and not {"generator-1", "generator-2"} & set(names) and "generator-0" in names:
            run.interrupt(snapshot)

    run.react = react
    assert run.until_end().exit_code == ExitCode.OK
    assert asked == [3, 1]
    assert [run.state(f"generator-{number}") for number in range(3)] == [JobState.ENDED] * 3


@pytest.mark.long
def test_a_frozen_launched_worker_is_replaced_by_its_heartbeat_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = LaunchedRun(tmp_path, "supervisor.silent_after_s=6")
    frozen: list[int] = []
    asked: list[int] = []

    def freeze(snapshot: RunSnapshot) -> None:
        (beat,) = (beat for beat in snapshot.workers if beat.who.worker == "generator-0")
        frozen.append(beat.pid)
        os.kill(beat.pid, signal.SIGSTOP)
        run.react = until_back

    def until_back(snapshot: RunSnapshot) -> None:
        if any(beat.who.worker == "generator-0" and beat.pid not in frozen for beat in snapshot.workers):
            run.interrupt(snapshot)

    run.when_live(freeze)
    activity_of_process = host_fleet.activity_of
    monkeypatch.setattr(host_fleet, "activity_of", lambda pid: asked.append(pid) or activity_of_process(pid))
    assert run.until_end().exit_code == ExitCode.OK
    assert frozen
    assert not set(asked) & set(frozen), "its process id may be another host's"
