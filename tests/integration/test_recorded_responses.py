"""Learning from a file of responses: the fleet learns what one process does, bit for bit, whatever
dies on the way. No response is trained on twice or lost. With guidance it learns more."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from ops.demo import guided_responses
from ops.demo.task import Split, draw, write_response
from pipeline.config.load import read_resolved
from pipeline.config.schema import RunConfig
from pipeline.data.source import PromptSource
from pipeline.data.tokenizer import load_text_tokenizer
from pipeline.ledger.types import ClaimedUnit, ScoredChunk
from pipeline.training.update_log.folder import read_log
from protocol.ids import ChunkId, TrajectoryId
from protocol.trajectory import Field, RewardScore, Segment, TrajectoryChunk
from tests.integration.fleet import ROOT, RunningFleet, fleet, kill
from workers.engines.build import build_training_backend
from workers.learner.policy_update import PolicyUpdate

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


def read_units(config: RunConfig) -> Iterator[ClaimedUnit]:
    """Yield the responses of the file in the run's order, as a learner would claim them."""
    source = PromptSource(config, load_text_tokenizer(config.model.path))
    assert source.responses is not None
    for position in range(NUM_RESPONSES * EPOCHS):
        prompt = source.at(position)
        found = source.responses.at(prompt.prompt_id)
        chunk = TrajectoryChunk(
            id=ChunkId(TrajectoryId("t", position, 0), 0),
            prompt=prompt,
            context_tokens=np.empty(0, np.int32),
            tokens=found.tokens,
            behavior_logprobs=np.zeros(found.tokens.size, np.float32),
            segments=(Segment(0, found.tokens.size),),
            finish_reason=found.finish_reason,
        )
        verdict = float(prompt.extra["verdict"])
        scored = ScoredChunk(chunk, {Field.REWARD: RewardScore(reward=verdict, accuracy=verdict)})
        yield ClaimedUnit(str(position), ((scored,),))


async def at_once(function: Callable[..., Any], *arguments: Any) -> Any:
    return function(*arguments)


def learned_alone(config: RunConfig) -> dict[str, torch.Tensor]:
    """Return the weights that the same updates give without fleet, ledger or wire."""
    backend = build_training_backend(config)
    update, units = PolicyUpdate(config, backend), read_units(config)
    for version in range(NUM_UPDATES):
        prepared = update.prepare([next(units) for _ in range(PER_UPDATE)])
        asyncio.run(update.step(prepared.samples, policy_version=version, compute=at_once))
    return dict(backend.tensors())


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
    own = learned_alone(config)
    last = max((run.run_dir / "checkpoints").glob("*.version-*"))
    learned = load_file(last / "model" / "model.safetensors")
    start = load_file(config.model.path / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(learned[name], start[name]), "it has learned something"
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
