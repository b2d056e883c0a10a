"""Claims about settings that were given and are not read: they are listed, with the reason."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pipeline.algorithms import build
from pipeline.algorithms.batching import TrainingSample
from pipeline.config.catalogue import BUILT_IN
from pipeline.config.describe import settings
from pipeline.config.learning import ClipSettings, settings_of
from pipeline.config.load import load_config, resolve_paths, write_resolved
from pipeline.config.schema import RunConfig
from pipeline.config.unread import given_keys, in_words, unread, why_unread
from pipeline.ledger.types import Unit
from tests.pipeline.algorithms.value_units import chunk_units, group_units, responses, trajectory_units
from tests.pipeline.config.test_describe import MINIMAL

RECORDED = ("data.train=[]", 'data.responses=["r.jsonl"]', "algorithm.name=sft")


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(MINIMAL)
    return path


@pytest.mark.parametrize(
    ("overrides", "keys"),
    [
        # the default, but given
        (["algorithm.importance=none", "algorithm.importance_cap=2"], {"algorithm.importance_cap"}),
        (["algorithm.name=ppo", "algorithm.gae_lambda=0.9"], set()),
        # adapts to the length
        (["algorithm.name=vapo", "algorithm.gae_lambda=0.9"], {"algorithm.gae_lambda"}),
        (["algorithm.name=tppo", "algorithm.tail_drop_tokens=4"], set()),
        (["value.learning_rate=1e-3", "value.deepspeed.stage=1"], {"value.learning_rate", "value.deepspeed.stage"}),
        # one step an update: all ratios are 1
        (["algorithm.clip_high=0.3"], {"algorithm.clip_high"}),
        (["algorithm.clip_high=0.3", "algorithm.num_minibatches=2"], set()),
        (["algorithm.clip_high=0.3", "algorithm.importance=bypass"], set()),
        (["algorithm.importance=none", "algorithm.importance_cap=3"], {"algorithm.importance_cap"}),
        (["algorithm.importance=none", "algorithm.importance_level=sequence"], {"algorithm.importance_level"}),
        (["algorithm.importance_level=sequence"], set()),
        (["algorithm.rejection_upper=2"], {"algorithm.rejection_upper"}),
        (["algorithm.rejection_upper=2", "algorithm.rejection=ratio", "algorithm.rejection_level=seq-max"], set()),
        (["algorithm.kl_estimator=k1"], {"algorithm.kl_estimator"}),
        (["algorithm.kl_estimator=k2", "algorithm.kl_coefficient=0.1"], set()),
        (["reward.overlong_cache_tokens=5"], {"reward.overlong_cache_tokens"}),
        (["evaluation.num_prompts=5"], {"evaluation.num_prompts"}),
        (["evaluation.num_prompts=5", 'data.evaluation=["h.jsonl"]'], set()),
        (["generation.vllm.pause=wait"], {"generation.vllm.pause"}),
        (['generation.stop_strings=["x"]'], set()),
        (["engines.settings.speed=2"], {"engines.settings"}),
        (["engines.settings.speed=2", "learner.backend=own:learner"], set()),
        (["guidance.judge_ratio=2.0"], {"guidance.judge_ratio"}),
        (["guidance.judge_ratio=2.0", "algorithm.guidance=mix"], set()),
        (["guidance.cluster_power=0.2", "algorithm.guidance=mix"], {"guidance.cluster_power"}),
        (["guidance.loss_scale=2.0", "algorithm.guidance=mix"], {"guidance.loss_scale"}),
        (["guidance.loss_scale=2.0", "algorithm.name=nlft-first"], set()),
        (["guidance.max_flagged_share=0.2", "algorithm.name=nlft-first"], {"guidance.max_flagged_share"}),
        (["guidance.max_flagged_share=0.2", "algorithm.name=nlft"], set()),
        (["data.response_verifier=math"], {"data.response_verifier"}),
        (["data.columns.verdict=mark"], {"data.columns.verdict"}),
        ([*RECORDED, "data.response_verifier=math", "data.columns.verdict=mark"], set()),
        ([*RECORDED, "data.verifier=math"], {"data.verifier"}),
        ([*RECORDED, "data.verifier=math", 'data.evaluation=["h.jsonl"]'], set()),
        ([*RECORDED, "learner.logprob_check_share=0.5"], {"learner.logprob_check_share"}),
        (["reference.threads=2"], {"reference.threads"}),
        (["reference.threads=2", "algorithm.guidance=mix"], set()),
        (["learner.lora.alpha=8"], {"learner.lora.alpha"}),
        (["learner.final_rate_share=0.1"], {"learner.final_rate_share"}),
        (["learner.schedule=cosine", "learner.final_rate_share=0.1"], set()),
        (["learner.schedule=cosine", "learner.decay_updates=5"], {"learner.decay_updates"}),
        (["learner.optimizer=adafactor", "learner.betas=[0.8, 0.9]"], {"learner.betas"}),
        (["learner.learning_rate=1e-3", "staleness.eta=1", "fleet.value=1"], set()),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_is_given_and_not_read_is_named(run_file: Path, overrides: list[str], keys: set[str]) -> None:
    assert unread(load_config([run_file], overrides)).keys() == keys


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        (["value.deepspeed.stage=1"], "dapo has no critic"),
        (["value.deepspeed.stage=1", "algorithm.name=ppo"], "value.backend is not deepspeed"),
        (["learner.decay_updates=5"], "learner.schedule is constant"),
        (
            ["learner.decay_updates=5", "learner.schedule=linear"],
            "only schedule warmup-stable-decay has a decay of separate length",
        ),
        (["guidance.cluster_power=0.2"], "dapo reads no guidance, and algorithm.guidance is none"),
        (["generation.vllm.pause=wait"], "generation.engine is not vllm"),
        (
            [*RECORDED, "generation.vllm.pause=wait"],
            "data.responses are read, and there is no evaluation, so nothing is sampled",
        ),
    ],
)
def test_the_reason_is_that_of_the_outermost_section_which_is_not_read(
    run_file: Path, overrides: list[str], why: str
) -> None:
    assert list(unread(load_config([run_file], overrides)).values()) == [why]


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_setting_of_a_rule_can_be_asked_whether_it_is_read(run_file: Path, name: str) -> None:
    config = load_config([run_file], [f"algorithm.name={name}"])
    whys = {one.key: why_unread(config, one) for one in settings() if one.is_in(name)}
    assert whys["model.path"] == "" and whys["tracing.share"] == "tracing.otlp is not set"
    assert bool(whys["value.gae_lambda"]) is not config.has_critic


def test_what_a_name_brings_does_not_count_as_given(run_file: Path) -> None:
    config = load_config([run_file], ["algorithm.name=gspo"])
    assert isinstance(config.algorithm, ClipSettings) and config.algorithm.clip_high == 4e-4
    assert "algorithm.clip_high" not in set(given_keys(config))
    assert not unread(config)


def test_a_resumed_run_reports_given_settings_and_not_its_whole_resolved_file(run_file: Path, tmp_path: Path) -> None:
    given = ["algorithm.gae_lambda=0.9", "algorithm.name=vapo"]
    resolved = write_resolved(resolve_paths(load_config([run_file], given)), tmp_path)
    again = load_config([resolved])
    assert unread(again).keys() == {"algorithm.gae_lambda"}
    assert unread(load_config([resolved], ["learner.lora.alpha=1.0"])).keys() == {
        "algorithm.gae_lambda",
        "learner.lora.alpha",
    }


def test_findings_name_the_settings_and_the_reason_once(run_file: Path) -> None:
    config = load_config([run_file], ["value.threads=2", "value.ranks=1", "learner.lora.alpha=1"])
    assert in_words(config) == [
        "set, but not read: value.ranks, value.threads (dapo has no critic)",
        "set, but not read: learner.lora.alpha (learner.lora.rank is 0)",
    ]


_OTHER = {
    "algorithm.gamma": 0.5,
    "algorithm.gae_lambda": 0.3,
    "algorithm.adaptive_lambda_alpha": 5.0,
    "algorithm.adaptive_lambda_floor": 0.7,
    "algorithm.whiten": "false",
    "algorithm.whiten_min_std": 1e9,
    "algorithm.advantage_clamp": 1e-4,
    "algorithm.tail_drop_tokens": 2,
}

_UNITS = {Unit.GROUP: group_units, Unit.TRAJECTORY: trajectory_units, Unit.CHUNK: chunk_units}


def _samples(config: RunConfig) -> list[TrainingSample]:
    return build(config).prepare(_UNITS[config.declaration.unit](responses(3, longest=24), window=12))


def _are_equal(some: list[TrainingSample], others: list[TrainingSample]) -> bool:
    return all(
        np.array_equal(a.advantages, b.advantages) and np.array_equal(a.loss_mask, b.loss_mask)
        for a, b in zip(some, others, strict=True)
    )


@pytest.mark.parametrize("name", list(BUILT_IN))
def test_what_is_named_changes_no_sample_and_what_is_not_named_does(run_file: Path, name: str) -> None:
    base = [f"algorithm.name={name}", "algorithm.group_size=4", "generation.window_tokens=12"]
    plain = _samples(load_config([run_file], base))
    there = settings_of(name).model_fields
    others = {**_OTHER, "algorithm.normalize_std": str(name == "dr-grpo").lower()}
    for key, value in ((key, value) for key, value in others.items() if key.partition(".")[2] in there):
        changed = load_config([run_file], [*base, f"{key}={value}"])
        assert _are_equal(plain, _samples(changed)) == (key in unread(changed)), key
