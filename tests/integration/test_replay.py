"""A real asynchronous run, with a learner killed in the middle of it, is made again bit for bit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.integration.fleet import ROOT, fleet, kill

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

QUICK = (
    "run.num_updates=1000",
    "algorithm.groups_per_update=2",
    "algorithm.group_size=4",
    "algorithm.num_minibatches=2",
    "data.evaluation=[]",
    "checkpoint.every_updates=3",
    "checkpoint.keep=1",
    "ledger.lease_s=3",
    "ledger.scoring_deadline_s=3",
)


def replay(run_dir: Path, *arguments: str, code: int = 0) -> Any:
    command = [sys.executable, "-m", "pipeline.cli", "replay", str(run_dir), "--json", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == code, done.stdout + done.stderr
    return json.loads(done.stdout)


def test_a_run_whose_learner_was_killed_is_made_again_bit_for_bit(tmp_path: Path) -> None:
    with fleet(tmp_path, *QUICK) as run:
        run.wait_until(lambda: run.num_updates() >= 5, "the fifth update", timeout_s=150.0)
        before = kill(run, "learner")
        run.wait_until(lambda: run.workers().get("learner", {}).get("epoch", 0) > before["epoch"], "another learner")
        seen = run.num_updates()
        run.wait_until(lambda: run.num_updates() >= seen + 4, "its updates", timeout_s=150.0)
    told = replay(run.run_dir)
    assert told["first_difference"] is None
    assert (told["num_unreachable"], told["environment"]) == (0, {})
    made = [one["policy_version"] for one in told["remade"] if one["recorded_losses"] is not None]
    assert told["num_equal"] == len(made) >= 9
    rows = [json.loads(line) for line in (run.run_dir / "history.jsonl").read_text().splitlines()]
    kept = {row["policy_version"] for row in rows if row["kind"] == "update"}
    assert kept <= set(made), "every update of the run's history is in the log"
    [checkpoint] = (run.run_dir / "checkpoints").glob("[0-9]*")
    newest = int(checkpoint.name.partition("version-")[2])
    out = tmp_path / "again"
    assert replay(run.run_dir, "--to", str(newest), "--out", str(out))["num_equal"] > 0
    name = "model/model.safetensors"
    assert (out / name).read_bytes() == (checkpoint / name).read_bytes(), "the run's last weights, from the start model"
