"""Claims about fleets that change while they run: workers join, drain, die and freeze, and so does
the supervisor."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from pipeline.process.exit_codes import ExitCode
from pipeline.process.records import process_runs
from tests.integration.fleet import EMULATED, ROOT, RunningFleet, fleet, kill

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

QUICK = (
    *EMULATED,
    "run.num_updates=1000",
    "algorithm.groups_per_update=2",
    "algorithm.group_size=4",
    "algorithm.max_generation_batches=0",
    "checkpoint.every_updates=1000",
    "ledger.lease_s=3",
    "ledger.scoring_deadline_s=3",
    "supervisor.drain_timeout_s=60",
)


class Guests:
    """Workers started by hand against a run, as in the runbook."""

    def __init__(self, run: RunningFleet) -> None:
        self._run = run
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, role: str, *more: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-P", "-m", "workers", role, "--run", str(self._run.run_dir), *more]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        with self._run.output.open("ab") as output:
            process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
        self.processes.append(process)
        return process

    def worker(self, process: subprocess.Popen[bytes]) -> dict[str, Any] | None:
        assert process.poll() is None, self._run.output.read_text()
        return next((w for w in self._run.workers().values() if w["pid"] == process.pid), None)

    def works(self, process: subprocess.Popen[bytes], counter: str) -> dict[str, Any]:
        """Wait until a guest has done work of its role."""

        def has_worked() -> dict[str, Any] | None:
            found = self.worker(process)
            return found if found is not None and found["counters"].get(counter, 0) > 0 else None

        return self._run.wait_until(has_worked, f"{counter} of {process.args}")


@contextmanager
def guests_of(run: RunningFleet) -> Iterator[Guests]:
    guests = Guests(run)
    try:
        yield guests
    finally:
        for process in guests.processes:
            process.kill()
            process.wait()


def goes_on(run: RunningFleet) -> None:
    last = run.num_updates()
    run.wait_until(lambda: run.num_updates() >= last + 2, "two more updates")
    assert run.audit()["balances"] is True


def log_of(run: RunningFleet, worker: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run.run_dir / "logs" / f"{worker}.jsonl").read_text().splitlines()]


def lives(run: RunningFleet) -> dict[str, tuple[int, int]]:
    return {name: (worker["pid"], worker["epoch"]) for name, worker in run.workers().items()}


def test_workers_join_drain_die_and_freeze_and_nobody_else_notices(tmp_path: Path) -> None:
    with fleet(tmp_path, *QUICK, "fleet.generator=1") as run, guests_of(run) as guests:
        run.wait_until(lambda: run.num_updates() >= 1, "the first update")
        own = lives(run)

        generator, reward = guests.start("generator"), guests.start("reward")
        frozen = guests.start("generator", "--name", "generator-cold")
        name = guests.works(generator, "chunks")["worker"]
        guests.works(reward, "scored")

        reward.terminate()
        generator.terminate()
        assert reward.wait(60) == ExitCode.OK
        assert generator.wait(60) == ExitCode.OK
        drained = next(row for row in log_of(run, name) if row["event"] == "generator_drained")
        assert drained["sampled_tokens"] > 0
        assert drained["sampled_tokens"] == drained["written_tokens"] + drained.get("refused_tokens", 0), "to the token"
        goes_on(run)

        guests.works(frozen, "chunks")
        frozen.send_signal(signal.SIGSTOP)
        successor = guests.start("generator", "--name", "generator-cold")
        guests.works(successor, "chunks")
        frozen.send_signal(signal.SIGCONT)
        assert frozen.wait(60) == ExitCode.FENCED, "what it still had to write was refused"
        # its trajectories go on elsewhere, and its name is forgotten
        successor.kill()
        successor.wait()
        goes_on(run)

        run.command("scale", "reward=2", "--run", str(run.run_dir))
        run.wait_until(lambda: "reward-1" in run.workers(), "one more of the supervisor's own")
        run.command("scale", "reward=1", "--run", str(run.run_dir))
        run.wait_until(lambda: lives(run).keys() == own.keys(), "the fleet as it was")
        goes_on(run)
        assert lives(run) == own, "nobody was restarted"
        run.command("down", str(run.run_dir))
        assert run.finish() == 0, run.output.read_text()
        assert run.audit()["balances"] is True


def test_a_killed_supervisor_is_succeeded_without_a_worker_lost_or_doubled(tmp_path: Path) -> None:
    with fleet(tmp_path, *QUICK) as run, guests_of(run) as guests:
        run.wait_until(lambda: run.num_updates() >= 2, "the second update")
        run.command("scale", "generator=3", "--run", str(run.run_dir))
        guest = guests.start("reward")
        guests.works(guest, "scored")
        run.wait_until(lambda: "generator-2" in run.workers(), "the third generator")
        before = lives(run)
        run.process.kill()
        run.process.wait()
        assert kill(run, "generator-1")["pid"] == before["generator-1"][0]
        with fleet(tmp_path, resume=run.run_dir) as resumed:
            resumed.wait_until(
                lambda: lives(resumed).get("generator-1", before["generator-1"]) != before["generator-1"],
                "the generator that died unsupervised",
            )
            goes_on(resumed)
            after = lives(resumed)
            assert after.pop("generator-1")[1] > before.pop("generator-1")[1]
            assert after == before, (
                "adopted as they were: the guest, the scaled ones, the learner with its unsaved updates"
            )
            resumed.command("down", str(resumed.run_dir))
            assert resumed.finish() == 0, resumed.output.read_text()
            assert guest.wait(60) == ExitCode.OK, "a guest leaves with the run"
            audit = resumed.audit()
            assert audit["balances"] is True
            assert audit["groups"]["trained"] == 2 * resumed.num_updates(), "no update was made twice"
            assert not any(process_runs(pid) for pid, _ in after.values())
