"""Learning from a file of responses: the fleet learns what one process does, bit for bit, whatever
dies on the way. No response is trained on twice or lost. With guidance it learns more."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ops.bench.one_process import OneProcess
from ops.demo import guided_responses
from ops.demo.task import Split, draw, write_response
from pipeline.config.load import read_resolved
from pipeline.training.update_log.folder import read_log
from tests.integration.fleet import ROOT, RunningFleet, fleet, kill

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

NUM_RESPONSES, EPOCHS, PER_UPDATE = 12, 20, 4
NUM_UPDATES = NUM_RESPONSES * EPOCHS // PER_UPDATE


def write_responses(path: Path) -> Path:
    dice = random.Random(7)
    problems = [draw(dice, Split.TRAIN, num_terms=4 + number % 5) for number in range(NUM_RESPONSES)]
    lines = [
        {"prompt": one.prompt, "response": write_response(one.counter), "verdict": number % 3 != 0}
        for number, one in enumerate(problems)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def settings(file: Path) -> tuple[str, ...]:
    return (
        "data.train=[]",
        f"data.responses=['{file}']",
        "data.evaluation=[]",
        f"data.epochs={EPOCHS}",
        f"run.num_updates={NUM_UPDATES}",
        "algorithm.name=rft",
        "algorithm.group_size=1",
        f"algorithm.groups_per_update={PER_UPDATE}",
        "algorithm.num_minibatches=1",
        "staleness.eta=0",
        "reward.overlong=none",
        "reference.always=false",
        "learner.learning_rate=1e-3",
        "learner.warmup_updates=0",
        "checkpoint.every_updates=10",
        "ledger.lease_s=3",
        "ledger.scoring_deadline_s=3",
        "fleet.generator=2",
        "fleet.reference=0",
    )


def has_updates(run: RunningFleet, num: int) -> None:
    run.wait_until(lambda: run.num_updates() >= num, f"update {num}", timeout_s=150.0)


def test_a_fleet_with_deaths_learns_from_a_file_as_one_process_does_bit_for_bit(tmp_path: Path) -> None:
    file = write_responses(tmp_path / "responses.jsonl")
    with fleet(tmp_path, *settings(file)) as run:
        has_updates(run, 3)
        kill(run, "generator-0")
        has_updates(run, 8)
        kill(run, "learner")
        has_updates(run, 14)
        run.command("down", str(run.run_dir))
        assert run.finish() == 0
        assert run.num_updates() < NUM_UPDATES, "there is something left to resume"
    with fleet(tmp_path, resume=run.run_dir) as resumed:
        assert resumed.finish() == 0, resumed.output.read_text()[-4000:]
        audit = resumed.audit()
    assert audit["balances"]
    assert audit["trajectories"]["trained"] == NUM_RESPONSES * EPOCHS, "each response once an epoch"
    units = [unit for s in read_log(run.run_dir / "updates") for u in s.updates if u.outcome for unit in u.batch.units]
    assert set(Counter(units)) == {f"t.{n}.0" for n in range(NUM_RESPONSES * EPOCHS)}
    config = read_resolved(run.run_dir)
    alone = OneProcess(config)
    for _ in range(NUM_UPDATES):
        alone.update()
    last = max((run.run_dir / "checkpoints").glob("*.version-*"))
    learned = load_file(last / "model" / "model.safetensors")
    start = load_file(config.model.path / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(learned[name], start[name]), "it has learned something"
    own = dict(alone.tensors())
    assert learned.keys() <= own.keys()
    assert all(torch.equal(tensor, own[name]) for name, tensor in learned.items())


@pytest.mark.long
def test_guidance_teaches_more_than_imitation_and_is_made_again_bit_for_bit(tmp_path: Path) -> None:
    guided_responses.main(["--out", str(tmp_path / "guided"), "--heldout", "64"])
    files = (
        "data.train=[]",
        f"data.responses=['{tmp_path / 'guided' / 'responses.jsonl'}']",
        f"data.evaluation=['{tmp_path / 'guided' / 'heldout.jsonl'}']",
        "data.epochs=2",
        "run.num_updates=10",
        "evaluation.every_updates=10",
        "evaluation.num_prompts=64",
    )
    with fleet(tmp_path, *files, "algorithm.name=nlft-first", of=("nlft", "recorded")) as run:
        assert run.finish() == 0, run.output.read_text()[-4000:]
        assert run.audit()["balances"]
    command = [sys.executable, "-m", "pipeline.cli", "run", "replay", str(run.run_dir), "--json"]
    again = json.loads(subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=120).stdout)
    assert (again["num_equal"], again["first_difference"]) == (10, None)
    rows = [json.loads(line) for line in (run.run_dir / "history.jsonl").read_text().splitlines()]
    before, *_, after = [row["accuracy"] for row in rows if row["kind"] == "evaluation"]
    assert before < 0.5 < 0.8 < after
    guided = [row for row in rows if row["kind"] == "update"]
    assert all(row["metrics"]["unguided_fraction"] == 0.0 for row in guided)
    assert max(row["metrics"]["flagged_fraction"] for row in guided) > 0.0
