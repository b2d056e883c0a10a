"""Claims about whole fleets with a value process: real processes, real Redis, real ZeroMQ, a real
(small) model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.integration.fleet import EMULATED, ROOT, RunningFleet, fleet, kill
from tests.pipeline.observability.rows import answers_of

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

SMALL = (
    "run.num_updates=4",
    "algorithm.groups_per_update=4",
    "algorithm.group_size=8",
    "evaluation.num_prompts=32",
    "checkpoint.every_updates=2",
    "value.batch_trajectories=32",
    "value.learning_rate=1e-3",
    "value.pretrain_steps=6",
)


def value_steps(run: RunningFleet) -> list[dict[str, Any]]:
    path = run.run_dir / "value-history.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def first_update_s(run: RunningFleet) -> float:
    rows = [json.loads(line) for line in (run.run_dir / "history.jsonl").read_text().splitlines()]
    return next(row["at_s"] for row in rows if row["kind"] == "update")


@pytest.mark.parametrize(
    "algorithm", ["vapo", pytest.param("ppo", marks=pytest.mark.long), pytest.param("tppo", marks=pytest.mark.long)]
)
def test_the_policy_starts_when_the_critic_is_ready_and_the_ledger_balances(tmp_path: Path, algorithm: str) -> None:
    with fleet(tmp_path, *SMALL, f"algorithm.name={algorithm}") as run:
        assert run.finish() == 0, run.output.read_text()
        steps = value_steps(run)
        opened = next(row for row in steps if row["gate_open"])
        assert opened["at_s"] < first_update_s(run)
        assert [row["step"] for row in steps] == list(range(1, len(steps) + 1))
        audit = run.audit()
        assert audit["balances"] is True
        warmups = (audit[kind]["dropped"].get("value_warmup", 0) for kind in ("groups", "trajectories"))
        assert sum(warmups) > 0
        finished = audit["finished"]
        settled_at_the_gate = sum(row["num_trajectories"] for row in steps if row["step"] <= opened["step"])
        assert finished["trained"] >= settled_at_the_gate
        # the end of a run cancels the settling that the value worker's last checkpoint left open,
        # if any
        assert finished["trained"] + finished["dropped"].get("cancelled", 0) >= sum(
            row["num_trajectories"] for row in steps
        )
        assert answers_of(run.run_dir / "report.html")["runs/test/history"]["values"]["explained_variance"]
        assert any((run.run_dir / "value-checkpoints").glob("*/model/model.safetensors"))


def test_a_killed_value_worker_is_missed_by_name_and_its_successor_goes_on(tmp_path: Path) -> None:
    with fleet(
        tmp_path,
        *SMALL,
        *EMULATED,
        "run.num_updates=1000",
        "algorithm.name=tppo",
        "value.checkpoint_every_steps=2",
        "ledger.scoring_deadline_s=2",
        "supervisor.backoff_s=4",
    ) as run:
        run.wait_until(lambda: run.num_updates() >= 2, "the second update")
        before = kill(run, "value")
        run.wait_until(
            lambda: "value worker" in run.workers().get("learner", {}).get("detail", ""),
            "the learner to say that it misses the value worker",
        )
        run.wait_until(lambda: run.workers().get("value", {}).get("epoch", 0) > before["epoch"], "a new value worker")
        run.wait_until(lambda: run.workers().get("value", {}).get("counters", {}).get("gate_open") == 1.0, "its gate")
        seen, steps = run.num_updates(), len(value_steps(run))
        run.wait_until(lambda: run.num_updates() >= seen + 3, "updates after the kill")
        run.wait_until(lambda: len(value_steps(run)) > steps, "value steps after the kill")
        assert run.audit()["balances"] is True
        run.command("down", str(run.run_dir))
        assert run.finish() == 0
        assert run.audit()["balances"] is True
        versions = [row["value_version"] for row in value_steps(run)]
        assert versions == sorted(set(versions))


@pytest.mark.long
def test_a_pretrained_value_model_is_what_a_run_starts_from(tmp_path: Path) -> None:
    data = tmp_path / "data"
    subprocess.run([sys.executable, "-m", "ops.demo.task", "--out", str(data)], cwd=ROOT, check=True, timeout=60)
    out = tmp_path / "critic"
    settings = [
        *SMALL,
        "algorithm.name=vapo",
        f"run.dir={tmp_path / 'runs'}",
        "run.name=test",
        f"data.train=['{data / 'train.jsonl'}']",
        "value.min_explained_variance=0.99",
    ]
    command = [sys.executable, "-m", "pipeline.cli", "dev", "pretrain-value", "configs/demo.toml"]
    command += ["--fleet", "configs/fleets/demo.toml", "--out", str(out), "--json"]
    command += [argument for setting in settings for argument in ("--set", setting)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["num_steps"] >= 6 and len(told["explained_variances"]) == told["num_steps"]
    # no update, no evaluation
    assert not (tmp_path / "runs" / "test-value" / "history.jsonl").read_text()
    again = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert again.returncode == 2 and "exists; give a new or an empty folder" in again.stderr
    with fleet(tmp_path, *SMALL, "algorithm.name=vapo", f"value.path={out}", "value.pretrain_steps=0") as run:
        assert run.finish() == 0, run.output.read_text()
        assert run.num_updates() == 4
        assert "value_warmup" not in run.audit()["trajectories"]["dropped"]
