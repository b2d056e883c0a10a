"""Claims about faults in the middle of a run: dead and frozen workers, a dead ledger server, a
ledger without room."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import redis

from pipeline.fleet.repair.records import RepairRow, read_repairs
from pipeline.ledger.address import read_address
from pipeline.process.exit_codes import ExitCode
from tests.integration.fleet import EMULATED, RunningFleet, fleet, kill

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

QUICK = (
    *EMULATED,
    "run.num_updates=1000",
    "algorithm.groups_per_update=2",
    "algorithm.group_size=4",
    "checkpoint.every_updates=4",
    "ledger.lease_s=3",
    "ledger.scoring_deadline_s=3",
)


def updates(run: RunningFleet) -> list[dict[str, Any]]:
    """The rows of the history, torn last line aside."""
    lines = (run.run_dir / "history.jsonl").read_text().splitlines(keepends=True)
    rows = [json.loads(line) for line in lines if line.endswith("\n")]
    return [row for row in rows if row["kind"] == "update"]


def goes_on(run: RunningFleet, what: str) -> None:
    """The run trains two more updates, and its ledger balances."""
    last = updates(run)[-1]["policy_version"]
    run.wait_until(lambda: updates(run)[-1]["policy_version"] >= last + 2, f"updates after {what}")
    assert run.audit()["balances"] is True


def epoch(run: RunningFleet, worker: str) -> int:
    found = run.workers().get(worker)
    return -1 if found is None else found["epoch"]


def test_dead_and_frozen_processes_of_a_fleet_are_replaced_and_nothing_is_lost(tmp_path: Path) -> None:
    with fleet(tmp_path, *QUICK) as run:
        run.wait_until(lambda: run.num_updates() >= 6, "the sixth update")

        before = kill(run, "learner")
        announced = before["policy_version"]
        run.wait_until(lambda: epoch(run, "learner") > before["epoch"], "a new learner")
        run.wait_until(lambda: run.workers()["learner"]["policy_version"] > announced, "a version above all before")
        goes_on(run, "the learner's death")
        versions = [row["policy_version"] for row in updates(run)]
        assert versions == sorted(set(versions)), "a policy version came twice or went back"

        frozen = run.workers()["generator-0"]
        os.kill(frozen["pid"], signal.SIGSTOP)
        try:
            run.wait_until(
                lambda: epoch(run, "generator-0") > frozen["epoch"], "a new incarnation of the frozen generator"
            )
        finally:
            with_signal(frozen["pid"], signal.SIGCONT)
        goes_on(run, "the frozen generator")

        def repairs() -> dict[str, RepairRow]:
            return {row.worker: row for row in read_repairs(run.run_dir)[0]}

        run.wait_until(lambda: {"learner", "generator-0"} <= repairs().keys(), "both repairs on record")
        of_killed, of_frozen = repairs()["learner"], repairs()["generator-0"]
        assert "SIGKILL" in of_killed.cause and of_killed.detect_s == 0.0 < min(of_killed.replace_s, of_killed.reload_s)
        assert "no heartbeat" in of_frozen.cause and of_frozen.detect_s > 1.0

        address = read_address(run.run_dir)
        assert address is not None
        os.kill(address.pid, signal.SIGKILL)
        goes_on(run, "the ledger server's death")
        told = [json.loads(line) for line in (run.run_dir / "logs" / "supervisor.jsonl").read_text().splitlines()]
        codes = [row["exit_code"] for row in told if row["event"] == "worker_exited"]
        assert ExitCode.LEDGER_UNAVAILABLE not in codes, "a worker did not ride it out"
        fresh = read_address(run.run_dir)
        assert fresh is not None
        assert fresh.pid != address.pid

        run.command("down", str(run.run_dir))
        assert run.finish() == 0, run.output.read_text()
        audit = run.audit()
        assert audit["balances"] is True
        assert audit["groups"]["trained"] == 2 * len({row["update"] for row in updates(run)})


def test_a_ledger_without_room_stops_admission_reports_it_and_goes_on_with_room(tmp_path: Path) -> None:
    # no worker may fail; on a busy machine a slow one is not taken for a silent or a stuck one
    patient = ("supervisor.max_restarts=0", "supervisor.silent_after_s=60", "supervisor.stuck_after_s=120")
    with fleet(tmp_path, *QUICK, *patient, "checkpoint.every_updates=100000") as run:
        run.wait_until(lambda: run.num_updates() >= 2, "the second update")
        address = read_address(run.run_dir)
        assert address is not None
        with redis.Redis.from_url(address.url) as server:
            # even after units are settled, every write that needs room is refused
            server.config_set("maxmemory", server.info("memory")["used_memory"] // 4)
            said = run.wait_until(
                lambda: (
                    next((w["detail"] for w in run.workers().values() if "memory" in w["detail"]), None)
                    or ("memory" in run.status()["waits"] and run.status()["waits"])
                ),
                "a worker that waits for memory",
            )
            assert "memory" in said
            assert run.audit()["balances"] is True
            server.config_set("maxmemory", "256mb")
        goes_on(run, "the ledger had room again")
        run.command("down", str(run.run_dir))
        assert run.finish() == 0, run.output.read_text()
        assert run.audit()["balances"] is True


def test_batches_that_await_their_checkpoint_never_lock_up_a_small_ledger(tmp_path: Path) -> None:
    with fleet(
        tmp_path, *QUICK, "checkpoint.every_updates=100000", "ledger.max_memory_mb=8", "ledger.watermark=0.05"
    ) as run:
        log = run.run_dir / "logs" / "learner.jsonl"
        run.wait_until(lambda: "idle_checkpoint" in log.read_text() if log.exists() else False, "an early checkpoint")
        goes_on(run, "the early checkpoint")
        run.command("down", str(run.run_dir))
        assert run.finish() == 0, run.output.read_text()
        assert run.audit()["balances"] is True


def test_a_lost_scorers_chunks_are_scored_long_before_their_deadline(tmp_path: Path) -> None:
    patient = ("supervisor.silent_after_s=120", "supervisor.stopped_after_s=120", "supervisor.stuck_after_s=120")
    with fleet(tmp_path, *QUICK, *patient, "ledger.scoring_deadline_s=600", "fleet.reward=1") as run:
        run.wait_until(lambda: run.num_updates() >= 2, "the second update")
        stopped = run.workers()["reward-0"]
        os.kill(stopped["pid"], signal.SIGSTOP)

        def num_waiting() -> int:
            rows = run.command("ledger", "queues", str(run.run_dir))
            return next(row["depth"] for row in rows if row["name"] == "reward")

        run.wait_until(lambda: num_waiting() >= 8, "chunks in the mailbox of a stopped scorer")
        kill(run, "reward-0")
        goes_on(run, "the scorer's death")
        run.command("down", str(run.run_dir))
        assert run.finish() == 0, run.output.read_text()
        assert run.audit()["balances"] is True


def with_signal(pid: int, number: int) -> None:
    """Signal a process that may be gone by now."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return
