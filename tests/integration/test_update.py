"""Claims about a real fleet whose settings change while it runs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pipeline.process.exit_codes import ExitCode
from tests.integration.fleet import RunningFleet, fleet

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

SMALL = (
    "run.num_updates=4000",
    "data.evaluation=[]",
    "algorithm.groups_per_update=2",
    "algorithm.group_size=4",
    "learner.warmup_updates=0",
    "learner.learning_rate=1e-4",
    "checkpoint.every_updates=2",
    "supervisor.drain_timeout_s=60",
)


def updates(run_dir: Path) -> list[dict[str, Any]]:
    lines = (run_dir / "history.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["kind"] == "update"]


def made_with(run: RunningFleet, number: int, least: int = 1) -> list[dict[str, Any]]:
    def found() -> list[dict[str, Any]] | None:
        rows = [row for row in updates(run.run_dir) if row["settings_change"] == number]
        return rows if len(rows) >= least else None

    return run.wait_until(found, f"{least} updates with change {number}")


def test_a_running_run_takes_new_settings_keeps_them_and_replays(tmp_path: Path) -> None:
    with fleet(tmp_path, *SMALL) as run:
        folder = str(run.run_dir)
        run.wait_until(lambda: run.num_updates() >= 2, "two updates")
        answer = run.command("update", folder, "--set", "learner.learning_rate=3e-4", "--reason", "too slow")
        assert answer["is_taken"] is True
        supervisor, learner = answer["taken"]
        assert (supervisor["worker"], learner["worker"]) == ("supervisor", "learner")
        first = made_with(run, 1, 2)[0]
        assert first["update"] == learner["first_update"]
        rates = {row["settings_change"]: row["learning_rate"] for row in updates(run.run_dir)}
        assert rates == {0: pytest.approx(1e-4), 1: pytest.approx(3e-4)}
        assert "model.path cannot change" in run.refused("update", folder, "--set", "model.path=other")
        # a new learner begins with what holds
        pid = run.workers()["learner"]["pid"]
        os.kill(pid, signal.SIGKILL)
        made = len(updates(run.run_dir))
        run.wait_until(lambda: run.num_updates() >= made + 2, "updates of a new learner", 60.0)
        assert run.workers()["learner"]["pid"] != pid
        later = updates(run.run_dir)[made:]
        assert {row["settings_change"] for row in later} == {1}
        assert [row["learning_rate"] for row in later] == [pytest.approx(3e-4)] * len(later)
        run.command("update", folder, "--rollback")
        assert made_with(run, 2)[-1]["learning_rate"] == pytest.approx(1e-4)
        shown = run.command("update", folder)
        assert [one["change"]["undoes"] for one in shown] == [0, 1]
        assert shown[0]["before"]["learning_rate"] == pytest.approx(1e-4)
        assert shown[0]["after"]["learning_rate"] == pytest.approx(3e-4)
        # and ends by a number of updates that was not known at its start
        end = run.num_updates() + 12
        run.command("update", folder, "--set", f"run.num_updates={end}")
        assert run.finish() == ExitCode.OK
    assert updates(run.run_dir)[-1]["update"] == end
    words = [sys.executable, "-m", "pipeline.cli", "run", "replay", str(run.run_dir), "--json"]
    replayed = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
    report = json.loads(replayed.stdout)
    # the killed learner had begun one more
    again = [one for one in report["remade"] if one["recorded_losses"] is not None]
    assert report["num_equal"] == len(again) >= end
    assert report["first_difference"] is None
