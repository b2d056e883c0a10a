"""Claims about the shipped run files: they load, and fit the task and the paper."""

from __future__ import annotations

from pathlib import Path

import pytest

from ops.demo.task import MAX_RESPONSE_TOKENS, MAX_TERMS
from pipeline.config.catalogue import BUILT_IN
from pipeline.config.learning import ClipSettings, SampledSettings
from pipeline.config.load import load_config
from pipeline.config.schema import RunConfig

CONFIGS = Path(__file__).parents[2] / "configs"
TRAIN = Path("runs/demo-data/train.jsonl")
DEMOS = {
    path.stem: config for path in sorted(CONFIGS.glob("*.toml")) if TRAIN in (config := load_config([path])).data.train
}
"""The configurations of `make demo`, by ALGO."""
RECORDED = ("nlft", "sft")
"""Those of the demo of recorded responses."""


def test_the_demo_has_room_for_the_longest_chain_and_windows_shorter_than_the_tail():
    config = load_config([CONFIGS / "demo.toml", CONFIGS / "fleets" / "demo.toml"])
    assert config.data.max_prompt_tokens >= 3 * MAX_TERMS
    generation, reward = config.generation, config.reward
    assert generation.max_response_tokens - reward.overlong_cache_tokens >= MAX_RESPONSE_TOKENS
    assert generation.window_tokens < MAX_RESPONSE_TOKENS / 2
    assert config.needs_reference
    assert (config.fleet.generator, config.fleet.reward, config.fleet.reference) == (2, 1, 1)


@pytest.mark.parametrize("config", DEMOS.values(), ids=DEMOS)
def test_every_demo_takes_several_optimiser_steps_an_update_so_that_it_clips(config: RunConfig):
    algorithm = config.algorithm
    assert algorithm.num_minibatches > 1, "with one step an update every ratio is 1, and no clip bound is ever reached"
    if isinstance(algorithm, SampledSettings):
        assert algorithm.proximal == "recompute" or algorithm.importance == "bypass"
    in_a_step = algorithm.groups_per_update * algorithm.group_size // algorithm.num_minibatches
    assert in_a_step % algorithm.group_size == 0, "a mini-batch holds whole groups"


@pytest.mark.parametrize("config", DEMOS.values(), ids=DEMOS)
def test_every_demo_samples_groups_but_plain_ppo(config: RunConfig):
    assert (config.algorithm.group_size > 1) == (config.algorithm.name != "ppo")


def test_there_is_a_demo_of_every_kind_of_rule():
    # `make demo ALGO=nlft` has recorded responses
    by_response = {"nlft", "nlft-first", "sft", "rft"}
    assert {config.algorithm.name for config in DEMOS.values()} == BUILT_IN.keys() - {
        "reinforce++-baseline"
    } - by_response


def test_the_demo_of_recorded_responses_and_its_rival_differ_in_the_rule_alone():
    nlft, sft = (load_config([CONFIGS / f"{name}.toml", CONFIGS / "fleets" / "recorded.toml"]) for name in RECORDED)
    one, other = nlft.model_dump(), sft.model_dump()
    differs = {name for name in one if one[name] != other[name]}
    assert differs == {"run", "algorithm", "guidance"}
    assert one["run"] | {"name": "sft"} == other["run"]
    assert {name for name, value in one["algorithm"].items() if other["algorithm"][name] != value} == {"name"}
    assert nlft.run.num_updates * nlft.algorithm.groups_per_update == 50 * (nlft.data.epochs or 0)
    assert all(path.is_file() for path in (nlft.guidance.standard_template, nlft.guidance.judge_template) if path)


def test_the_full_size_run_has_the_papers_hyper_parameters():
    config = load_config([CONFIGS / "dapo-32b.toml", CONFIGS / "fleets" / "one-node.toml"])
    algorithm = config.algorithm
    assert isinstance(algorithm, ClipSettings)
    assert (algorithm.clip_low, algorithm.clip_high, algorithm.kl_coefficient) == (0.2, 0.28, 0.0)
    assert (algorithm.groups_per_update, algorithm.group_size, algorithm.num_minibatches) == (512, 16, 16)
    assert (algorithm.loss_aggregation, algorithm.dynamic_sampling) == ("token-mean", True)
    assert (config.learner.learning_rate, config.learner.warmup_updates) == (1e-6, 20)
    assert (config.generation.max_response_tokens, config.reward.overlong_cache_tokens) == (20480, 4096)
    assert (config.evaluation.samples_per_prompt, config.evaluation.top_p) == (32, 0.7)
    assert not config.needs_reference
