"""A real asynchronous run, with a learner killed in an update and between two, is made again bit by
bit. Each kill repeats at most one update."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from pipeline.training.snapshots import snapshots_folder
from pipeline.training.update_log.folder import read_log
from tests.integration.fleet import ROOT, RunningFleet, fleet, kill

pytestmark = [pytest.mark.integration, pytest.mark.long, pytest.mark.timeout(600)]

GROUPS_PER_UPDATE = 2
QUICK = (
    "run.num_updates=1000",
    f"algorithm.groups_per_update={GROUPS_PER_UPDATE}",
    "algorithm.group_size=4",
    "algorithm.num_minibatches=2",
    "data.evaluation=[]",
    "checkpoint.every_updates=1000",
    "checkpoint.keep=1",
    "ledger.lease_s=3",
    "ledger.scoring_deadline_s=3",
)


def replay(run_dir: Path, *arguments: str, code: int = 0) -> Any:
    command = [sys.executable, "-m", "pipeline.cli", "run", "replay", str(run_dir), "--json", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == code, done.stdout + done.stderr
    return json.loads(done.stdout)


def killed_when(run: RunningFleet, moment: Callable[[], bool]) -> None:
    """Kill the learner at a moment; return once its successor has gone on."""
    run.wait_until(moment, "the moment", timeout_s=60.0)
    before = kill(run, "learner")
    run.wait_until(lambda: run.workers().get("learner", {}).get("epoch", 0) > before["epoch"], "another learner")
    seen = run.num_updates()
    run.wait_until(lambda: run.num_updates() >= seen + 2, "its updates", timeout_s=150.0)


def begun_from(run: RunningFleet) -> list[str]:
    """Return what each learner began from."""
    lines = map(json.loads, (run.run_dir / "logs" / "learner.jsonl").read_text().splitlines())
    return [line["begun_from"] for line in lines if line.get("event") == "learner_ready"]


def repeats(run: RunningFleet) -> list[int]:
    """Return how many finished updates of the one before each learner but the first made again."""
    made: dict[int, list[tuple[int, bool]]] = {}
    for segment in read_log(run.run_dir / "updates"):
        made.setdefault(segment.epoch, []).extend((u.batch.update, u.outcome is not None) for u in segment.updates)
    lives = [made[epoch] for epoch in sorted(made)]
    return [max(number for number, is_made in before if is_made) + 1 - after[0][0] for before, after in pairwise(lives)]


def test_a_run_whose_learner_was_killed_is_made_again_bit_for_bit(tmp_path: Path) -> None:
    with fleet(tmp_path, *QUICK) as run:
        run.wait_until(lambda: run.num_updates() >= 4, "the fourth update", timeout_s=150.0)
        assert not list((run.run_dir / "checkpoints").glob("[0-9]*")), "what comes back is from memory alone"
        killed_when(run, lambda: run.workers()["learner"]["waiting_for"] == "compute")
        seen = run.num_updates()
        killed_when(run, lambda: run.num_updates() > seen)
        folder = snapshots_folder(run.run_dir)
        assert folder.is_dir()
        audit = run.audit()
        assert audit["balances"]
    assert not folder.exists(), "it goes with the run's end"
    assert [name.split(" of ")[0] for name in begun_from(run)] == ["the start model", "snapshot", "snapshot"]
    assert len(repeats(run)) == 2 and max(repeats(run)) <= 1
    units = [unit for s in read_log(run.run_dir / "updates") for u in s.updates if u.outcome for unit in u.batch.units]
    num_repeated = GROUPS_PER_UPDATE * sum(repeats(run))
    assert len(units) - len(set(units)) <= num_repeated, "a unit is in two updates only if the first was lost"
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
