"""A run with an environment: it trains through kills between and within turns, and nothing is lost or wrong."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from ops.demo import products
from pipeline.process.descendants import WORKER_MARK, marked, worker_mark
from pipeline.process.records import process_runs
from tests.integration.fleet import ROOT, fleet, kill

pytestmark = pytest.mark.integration


def settings(tmp_path: Path, *more: str) -> tuple[str, ...]:
    data = tmp_path / "products"
    products.main(["--out", str(data)])
    return (
        f"data.train=['{data / 'train.jsonl'}']",
        f"data.evaluation=['{data / 'heldout.jsonl'}']",
        "evaluation.num_prompts=16",
        "environment.path=slow_calculator:SlowCalculator",
        "environment.tools=[]",
        f"environment.folders=['{ROOT / 'tests' / 'integration' / 'environments'}']",
        "checkpoint.every_updates=2",
        *more,
    )


# a run with an agent, in test_agents, goes through the same kills
@pytest.mark.long
def test_a_run_with_an_environment_goes_on_through_kills_and_its_books_balance(tmp_path: Path) -> None:
    with fleet(tmp_path, *settings(tmp_path, "run.num_updates=9"), of=("tools", "demo")) as run:
        run.wait_until(lambda: run.num_updates() >= 1, "an update")
        kill(run, "environment-0")
        run.wait_until(lambda: run.num_updates() >= 3, "updates after the environment's death")
        kill(run, "generator-0")
        kill(run, "environment-0")
        assert run.finish() == 0, run.output.read_text()
        assert run.num_updates() == 9
        audit = run.audit()
        assert audit["balances"]
        groups = audit["groups"]
        assert (groups["trained"], "dead_letter" in groups["dropped"]) == (9 * 16, False), (
            "a killed turn is tried again"
        )
    assert not marked(WORKER_MARK, worker_mark(run.run_dir)), "nothing that it started is left"


@pytest.mark.long
def test_environment_workers_join_as_from_other_hosts_and_are_scaled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    joined = ("run.num_updates=1000", "wire.transport=tcp", "launch.on=join", "launch.roles=['environment']")
    with fleet(tmp_path, *settings(tmp_path, *joined), of=("tools", "demo")) as run:
        run.wait_until(lambda: run.num_updates() >= 1, "an update")
        run.command("scale", "environment=2", "--run", str(run.run_dir))
        killed = run.workers()["environment-0"]["pid"]
        os.kill(killed, signal.SIGKILL)

        def both_answer() -> bool:
            workers = run.workers()
            found = [workers.get(name, {}) for name in ("environment-0", "environment-1")]
            return all(row.get("counters", {}).get("scored") and row["pid"] != killed for row in found)

        run.wait_until(both_answer, "answers of both")
        assert list((tmp_path / "cache").rglob("environment-1-*")), "it has a joined host's folder"
        assert run.audit()["balances"]


def test_what_a_class_has_started_ends_with_its_worker_also_when_the_supervisor_is_killed(tmp_path: Path) -> None:
    file = tmp_path / "pids"
    own = (
        "run.num_updates=1000",
        "environment.path=slow_calculator:StartsProcesses",
        f"environment.arguments={{file='{file}'}}",
    )

    def started() -> list[int]:
        return [int(pid) for pid in file.read_text().split()] if file.exists() else []

    def ended(pids: list[int]) -> bool:
        return not any(process_runs(pid) for pid in pids)

    with fleet(tmp_path, *settings(tmp_path, *own), of=("tools", "demo")) as run:
        run.wait_until(lambda: run.num_updates() >= 1, "an update")
        first = started()
        assert first and not ended(first)
        kill(run, "environment-0")
        run.wait_until(lambda: ended(first), "the end of what it had started", 5.0)
        run.wait_until(lambda: len(started()) > len(first), "those of the next worker")
        second = started()[len(first) :]
        assert not ended(second)
        pid = run.workers()["environment-0"]["pid"]
        run.process.kill()
        os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + 5.0
        while not ended(second) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert ended(second), "without a command"
        run.command("down", "--now", str(run.run_dir))
