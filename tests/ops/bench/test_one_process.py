"""Claims about learning in one process: it is a run's own learning, and a seed gives it again."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from ops.bench.one_process import OneProcess, learn
from ops.demo import task as demo_task
from pipeline.algorithms.batching import TrainingSample
from pipeline.config.load import load_config
from pipeline.data.source import PromptSource
from pipeline.data.tokenizer import load_text_tokenizer
from pipeline.ledger.types import ClaimedUnit
from protocol.errors import ConfigError
from workers.learner.policy_update import Prepared

ROOT = Path(__file__).parents[3]
SMALL = ("algorithm.groups_per_update=4", "learner.learning_rate=2e-3", "learner.warmup_updates=0")


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    folder = tmp_path_factory.mktemp("data")
    demo_task.main(["--out", str(folder), "--train", "256", "--heldout", "16"])
    return (
        f"model.path={ROOT / 'ops' / 'demo' / 'tiny_model'}",
        f"data.train=['{folder / 'train.jsonl'}']",
        f"data.evaluation=['{folder / 'heldout.jsonl'}']",
    )


def test_a_seed_gives_the_same_learning_again_and_another_seed_another(task: tuple[str, ...]) -> None:
    demo = ROOT / "configs" / "demo.toml"
    once, again, other = (learn(demo, seed, [*task, *SMALL], num_updates=2, every=1) for seed in (0, 0, 1))
    assert (once.held_out, once.clip_fraction, once.entropy) == (again.held_out, again.clip_fraction, again.entropy)
    assert once.entropy != other.entropy


@pytest.mark.parametrize("name", ["demo", "tppo"])
def test_one_optimiser_step_an_update_clips_nothing_and_several_clip_some(task: tuple[str, ...], name: str) -> None:
    def clipped(num_minibatches: int) -> float:
        settings = [*task, *SMALL, f"algorithm.num_minibatches={num_minibatches}", "value.batch_trajectories=8"]
        learner = OneProcess(load_config([ROOT / "configs" / f"{name}.toml"], settings))
        return max(learner.update()["clip_fraction"] for _ in range(3))

    assert clipped(1) == 0.0
    assert clipped(4) > 0.0


def test_recorded_responses_are_read_in_the_runs_order_and_without_behaviour(
    task: tuple[str, ...], tmp_path: Path
) -> None:
    file = tmp_path / "responses.jsonl"
    lines = [{"prompt": f"a{n}b+1=", "response": f"a{n}b{n + 1}={n + 1}", "verdict": n % 2} for n in range(6)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    settings = [*task, "data.train=[]", f"data.responses=['{file}']", "algorithm.group_size=1", "reward.overlong=none"]
    settings += ["algorithm.name=rft", "algorithm.groups_per_update=3", "algorithm.num_minibatches=1"]
    config = load_config([ROOT / "configs" / "demo.toml"], settings)
    learner, source = OneProcess(config), PromptSource(config, load_text_tokenizer(config.model.path))
    read = [one for _ in range(4) for [one] in learner._groups(filtered=False)]
    assert [one.prompt.prompt_id for one in read] == [source.at(position).prompt_id for position in range(12)]
    assert [one.score.accuracy for one in read] == [one.prompt.extra["verdict"] for one in read]
    assert learner.num_responses == 12
    metrics = learner.update()
    assert not [name for name in metrics if name.startswith(("behavior_", "importance_", "sequence_chi2"))]
    assert "proximal_logprob" in metrics


def test_the_critic_is_trained_until_its_gate_would_open(task: tuple[str, ...]) -> None:
    settings = [*task, *SMALL, "value.batch_trajectories=8", "value.pretrain_steps=5"]
    vapo = load_config([ROOT / "configs" / "vapo.toml"], settings)
    never = vapo.model_copy(update={"value": vapo.value.model_copy(update={"min_explained_variance": None})})
    assert OneProcess(never).pretrain() == 6, "two steps a batch of 16 responses, until five are done"
    assert OneProcess(load_config([ROOT / "configs" / "demo.toml"], task)).pretrain() == 0


def test_tppo_trains_one_window_of_each_response_and_continues_the_unfinished(
    task: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = [*task, *SMALL, "generation.window_tokens=8", "value.batch_trajectories=4"]
    learner = OneProcess(load_config([ROOT / "configs" / "tppo.toml"], settings))
    prepared: list[list[TrainingSample]] = []
    prepare = learner._update.prepare

    def recorded(units: list[ClaimedUnit]) -> Prepared:
        made = prepare(units)
        prepared.append(made.samples)
        return made

    monkeypatch.setattr(learner._update, "prepare", recorded)
    for _ in range(6):
        learner.update()
    ends = [sample for samples in prepared for sample in samples if sample.is_finished]
    assert all(len(samples) >= 16 for samples in prepared), "every update trains a window of each live response"
    assert all(np.count_nonzero(sample.loss_mask) <= 8 for samples in prepared for sample in samples)
    names = [sample.name for samples in prepared for sample in samples]
    assert len(set(names)) == len(names), "no window is trained twice"
    assert any(sample.name.endswith(".2") for sample in ends), "a response finished in its third window"


def test_a_window_as_long_as_the_cap_makes_tppo_whole_responses(task: tuple[str, ...]) -> None:
    settings = [*task, *SMALL, "generation.window_tokens=64", "value.batch_trajectories=8"]
    learner = OneProcess(load_config([ROOT / "configs" / "tppo.toml"], settings))
    for number in range(1, 3):
        assert "explained_variance" in learner.update()
        assert learner.num_responses == 16 * number


def test_what_one_process_has_not_is_refused(task: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="no reference policy"):
        OneProcess(load_config([ROOT / "configs" / "grpo.toml"], [*task, "algorithm.kl_coefficient=0.04"]))
