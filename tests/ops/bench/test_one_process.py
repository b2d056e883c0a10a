"""Claims about learning in one process: it is a run's own learning, and a seed gives it again."""

from __future__ import annotations

from pathlib import Path

import pytest

from ops.bench.one_process import OneProcess, learn
from ops.demo import task as demo_task
from pipeline.config.load import load_config
from protocol.errors import ConfigError

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
def test_with_one_optimiser_step_an_update_nothing_is_ever_clipped_and_with_several_some_is(
    task: tuple[str, ...], name: str
) -> None:
    def clipped(num_minibatches: int) -> float:
        settings = [*task, *SMALL, f"algorithm.num_minibatches={num_minibatches}", "value.batch_trajectories=8"]
        learner = OneProcess(load_config([ROOT / "configs" / f"{name}.toml"], settings))
        return max(learner.update()["clip_fraction"] for _ in range(3))

    assert clipped(1) == 0.0
    assert clipped(4) > 0.0


def test_the_critic_is_trained_until_its_gate_would_open(task: tuple[str, ...]) -> None:
    settings = [*task, *SMALL, "value.batch_trajectories=8", "value.pretrain_steps=5"]
    vapo = load_config([ROOT / "configs" / "vapo.toml"], settings)
    never = vapo.model_copy(update={"value": vapo.value.model_copy(update={"min_explained_variance": None})})
    assert OneProcess(never).pretrain() == 6, "two steps a batch of 16 responses, until five are done"
    assert OneProcess(load_config([ROOT / "configs" / "demo.toml"], task)).pretrain() == 0


def test_what_one_process_has_not_is_refused(task: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="no reference policy"):
        OneProcess(load_config([ROOT / "configs" / "grpo.toml"], [*task, "algorithm.kl_coefficient=0.04"]))
