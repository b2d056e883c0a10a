"""The learner's input to its backend: samples, log-probs and rule, window by window."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import workers.learner.learner
import workers.learner.restore
from pipeline.algorithms.base import Rule
from pipeline.algorithms.batching import TrainingSample
from pipeline.algorithms.dapo import Dapo
from pipeline.config.learning import (
    Importance,
    ImportanceLevel,
    KLEstimator,
    Proximal,
    Rejection,
    RejectionLevel,
    algorithm_settings,
)
from pipeline.config.load import load_config
from pipeline.config.runtime import GenerationSection
from pipeline.config.schema import RunConfig
from pipeline.ledger.types import ClaimedUnit, Restart
from pipeline.ledger.version_history import VersionHistory
from pipeline.training.spikes import NO_LIMITS, StepLimits
from protocol.trajectory import Field, RewardScore
from tests.pipeline.algorithms.value_units import chunk_units, group_units, responses, trajectory_units
from tests.pipeline.op_config import MODEL, write_config
from tests.pipeline.runtime.fakes import small_config
from tests.workers.dying import Reaper, World
from tests.workers.recording import RecordingTraining, policy_logprobs
from workers.engines.scoring.torch import build_scoring
from workers.engines.training.seam import MetricCounts, StepResult
from workers.engines.training.torch import forward_settings
from workers.learner.policy_update import PolicyUpdate, Stepped, is_made
from workers.learner.update_row import update_row

WINDOW, LIMIT = 6, 20
LOSS = {
    "clip_low": 0.15,
    "clip_high": 0.35,
    "dual_clip": 4.0,
    "loss_aggregation": "seq-mean-token-sum-norm",
    "importance": "icepop",
    "importance_cap": 3.0,
    "importance_floor": 0.25,
    "importance_level": "geometric",
    "rejection": "k1",
    "rejection_level": "seq-mean",
    "rejection_upper": 1.5,
    "rejection_lower": 0.75,
    "kl_coefficient": 0.02,
    "kl_estimator": "k2",
    "entropy_coefficient": 0.003,
    "positive_nll_coefficient": 0.3,
}
"""Every setting of the loss, none as a default."""


def config_of(folder: Path, **algorithm: object) -> RunConfig:
    settings: dict[str, Any] = {"group_size": 4, "groups_per_update": 3, "num_minibatches": 3} | algorithm
    sections = {
        "algorithm": algorithm_settings(**settings),
        "generation": GenerationSection(window_tokens=WINDOW, max_response_tokens=LIMIT),
    }
    return small_config(folder).model_copy(update=sections)


async def updated(config: RunConfig, units: list[ClaimedUnit], backend: RecordingTraining, version: int = 6) -> Stepped:
    async def compute(function: Callable[..., Any], *args: Any) -> Any:
        return function(*args)

    update = PolicyUpdate(config, backend)
    prepared = update.prepare(units)
    assert not prepared.refused
    return await update.step(prepared.samples, policy_version=version, compute=compute)


async def test_every_step_of_an_update_clips_around_the_policy_from_before_the_first(tmp_path: Path) -> None:
    """The proximal log-probs are computed anew from the present weights, once, for all samples,
    before any step."""
    backend = RecordingTraining()
    units = group_units(responses(4), WINDOW)
    await updated(config_of(tmp_path), units, backend)
    ((num_steps, asked),) = backend.asked
    assert num_steps == 0
    assert len(backend.steps) == 3
    stepped = [sample for samples, _ in backend.steps for sample in samples]
    assert [s.name for s in stepped] == [s.name for s in asked] == [f"t.{g}.{m}" for g in range(3) for m in range(4)]
    assert [len(samples) for samples, _ in backend.steps] == [4, 4, 4]
    for sample, response in zip(stepped, responses(4), strict=True):
        assert sample.old_logprobs is not None
        np.testing.assert_array_equal(sample.old_logprobs, policy_logprobs(sample, 0))
        assert not np.array_equal(sample.old_logprobs, sample.behavior_logprobs)
        np.testing.assert_array_equal(sample.behavior_logprobs, response.behavior_logprobs)
        np.testing.assert_array_equal(sample.tokens[sample.prompt_length :], response.tokens)
        assert sample.versions.tolist() == [3 + place // WINDOW for place in range(response.tokens.size)]


@pytest.mark.parametrize(
    "settings", [{"num_minibatches": 1}, {"importance": "bypass"}, {"proximal": "interpolate"}], ids=str
)
async def test_no_forward_pass_is_made_for_log_probs_that_no_step_reads(
    tmp_path: Path, settings: dict[str, object]
) -> None:
    backend = RecordingTraining()
    await updated(config_of(tmp_path, **settings), group_units(responses(4), WINDOW), backend)
    assert not backend.asked
    assert all(sample.old_logprobs is None for samples, _ in backend.steps for sample in samples)


async def test_a_minibatch_without_a_token_that_trains_takes_no_step(tmp_path: Path) -> None:
    """Its gradient is zero: weight decay and momentum alone would move the weights."""
    drawn = responses(4)
    masked = RewardScore(reward=-1.0, accuracy=0.0, masked=True)
    for place in (0, 1, 2, 3, 4, 8, 9, 10, 11):
        drawn[place] = replace(drawn[place], score=masked)
    backend = RecordingTraining()
    stepped = await updated(config_of(tmp_path), group_units(drawn, WINDOW), backend)
    ((samples, _),) = backend.steps
    assert [sample.name for sample in samples] == [f"t.1.{member}" for member in range(4)]
    assert [result.counts.loss_rows for result in stepped.results] == [3]
    assert is_made(stepped)


async def test_an_update_without_a_token_that_trains_makes_no_version(tmp_path: Path) -> None:
    drawn = [replace(one, score=RewardScore(reward=-1.0, accuracy=0.0)) for one in responses(4)]
    backend = RecordingTraining()
    config = config_of(tmp_path, name="rft", group_size=1)
    stepped = await updated(config, trajectory_units(drawn, WINDOW), backend)
    assert backend.steps == [] and backend.asked == []
    assert not is_made(stepped)


@pytest.mark.parametrize(("version", "shares"), [(7, {3: 1, 6: 1, 7: 0, 4: 0, 5: 1}), (6, {2: 1, 3: 0, 5: 2, 6: 0})])
async def test_the_interpolated_proximal_policy_counts_versions_by_their_updates(
    tmp_path: Path, version: int, shares: dict[int, int]
) -> None:
    """Version 3 was published again as 6, so that both have 3 updates, and 7 has 4 as the abandoned
    4 has. Number minus number, a token of 3 would be four versions older than 7, not one."""
    backend = RecordingTraining()
    update = PolicyUpdate(config_of(tmp_path, proximal="interpolate"), backend)
    samples = [aged([version], [True]) for version in shares]
    history = VersionHistory((Restart(6, 3),))

    async def compute(function: Callable[..., Any], *args: Any) -> Any:
        return function(*args)

    await update.step(samples, policy_version=version, compute=compute, history=history)
    found = [rule.proximal_version - s.versions for stepped, rule in backend.steps for s in stepped]
    assert np.concatenate(found).tolist() == [*shares.values()]
    assert all((s.versions >= 0).all() for stepped, _ in backend.steps for s in stepped)


@pytest.mark.parametrize("name", ["sft", "rft", "nlft", "nlft-first", "dapo", "ppo", "tppo"])
def test_imitation_trains_at_temperature_one_and_what_has_a_ratio_at_the_samplers(tmp_path: Path, name: str) -> None:
    """Learner and reference alike: p_s and p_j of guidance are compared with the policy's p_b."""
    given = [f"algorithm.name={name}", "generation.temperature=0.7"]
    if name == "tppo":
        given.append("algorithm.tail_drop_tokens=4")
    config = load_config([write_config(tmp_path)], given)
    is_imitation = name in ("sft", "rft", "nlft", "nlft-first")
    expected = 1.0 if is_imitation else 0.7
    assert forward_settings(config, torch.device("cpu")).temperature == expected
    assert build_scoring(config, MODEL)._temperature == expected
    assert config.compares_with_sampler is not is_imitation


async def test_imitation_of_recorded_responses_or_at_another_temperature_tells_nothing_of_the_sampler(
    tmp_path: Path,
) -> None:
    class Measuring(RecordingTraining):
        def step(self, samples: Sequence[TrainingSample], rule: Rule, limits: StepLimits = NO_LIMITS) -> StepResult:
            result = super().step(samples, rule, limits)
            return replace(result, metrics={"entropy": 1.0, "behavior_kl": 0.5, "importance_ratio": 2.0})

    files, everything = [tmp_path / "responses.jsonl"], {"entropy", "behavior_kl", "importance_ratio"}
    for temperature, recorded, told in ((0.7, [], {"entropy"}), (1.0, [], everything), (1.0, files, {"entropy"})):
        config = config_of(tmp_path, name="sft", group_size=1)
        generation = config.generation.model_copy(update={"temperature": temperature})
        data = config.data.model_copy(update={"responses": recorded})
        config = config.model_copy(update={"generation": generation, "data": data})
        stepped = await updated(config, trajectory_units(responses(4), WINDOW), Measuring())
        assert {name for result in stepped.results for name in result.metrics} == told


async def test_weights_normalised_over_the_only_minibatch_have_its_log_probs_first(tmp_path: Path) -> None:
    backend = RecordingTraining()
    config = config_of(tmp_path, num_minibatches=1, importance_normalize=True)
    await updated(config, group_units(responses(4), WINDOW), backend)
    ((num_steps, _),) = backend.asked
    assert num_steps == 0
    assert all(sample.old_logprobs is not None for samples, _ in backend.steps for sample in samples)


@pytest.mark.parametrize(("proximal", "normalize"), [("interpolate", False), ("recompute", True)])
async def test_the_rule_that_is_stepped_on_has_every_setting_of_the_run(
    tmp_path: Path, proximal: str, normalize: bool
) -> None:
    expected = Dapo(
        settings=Dapo.Settings(
            group_size=4,
            groups_per_update=3,
            num_minibatches=3,
            clip_low=0.15,
            clip_high=0.35,
            dual_clip=4.0,
            loss_aggregation="seq-mean-token-sum-norm",
            importance=Importance.ICEPOP,
            importance_cap=3.0,
            importance_floor=0.25,
            importance_level=ImportanceLevel.GEOMETRIC,
            importance_normalize=normalize,
            rejection=Rejection.K1,
            rejection_level=RejectionLevel.MEAN,
            rejection_upper=1.5,
            rejection_lower=0.75,
            proximal=Proximal(proximal),
            kl_coefficient=0.02,
            kl_estimator=KLEstimator.K2,
            entropy_coefficient=0.003,
            positive_nll_coefficient=0.3,
        ),
        fields=frozenset({Field.REWARD, Field.REFERENCE}),
        norm_length=float(LIMIT),
        window_tokens=WINDOW,
        proximal_version=6,
    )
    backend = RecordingTraining()
    config = config_of(tmp_path, proximal=proximal, importance_normalize=normalize, **LOSS)
    await updated(config, group_units(responses(4), WINDOW), backend)
    assert [rule for _, rule in backend.steps] == [expected] * 3


async def test_windows_are_stepped_on_one_by_one_with_their_prefix_as_context(tmp_path: Path) -> None:
    backend = RecordingTraining()
    config = config_of(tmp_path, name="tppo", tail_drop_tokens=2, num_minibatches=2, positive_nll_coefficient=0.0)
    drawn = responses(4)
    await updated(config, chunk_units(drawn, WINDOW), backend)
    samples = {sample.name: sample for minibatch, _ in backend.steps for sample in minibatch}
    for response in drawn:
        prompt_length = 3 + response.group % 3
        for index, start in enumerate(range(0, response.tokens.size, WINDOW)):
            sample = samples.pop(f"t.{response.group}.{response.member}.{index}")
            end = min(start + WINDOW, response.tokens.size)
            assert sample.prompt_length == prompt_length + start
            assert sample.tokens[prompt_length:].tolist() == response.tokens[:end].tolist()
            assert sample.behavior_logprobs.tolist() == response.behavior_logprobs[start:end].tolist()
            assert sample.versions.tolist() == [3 + index] * (end - start)
            tail = 0 if sample.is_finished else 2
            assert sample.loss_mask.tolist() == [place < end - start - tail for place in range(end - start)]
    assert not samples


async def test_a_critics_advantages_use_the_discount_and_lambda_of_the_run(tmp_path: Path) -> None:
    """Old values that were lost, or a discount of 1, would give others."""
    backend, drawn = RecordingTraining(), responses(4)
    settings = {"gamma": 0.9, "gae_lambda": 0.8, "whiten": False, "advantage_clamp": 0.0}
    await updated(
        config_of(tmp_path, name="ppo", num_minibatches=1, **settings), trajectory_units(drawn, WINDOW), backend
    )
    ((samples, _),) = backend.steps
    for sample, response in zip(samples, drawn, strict=True):
        values = response.values.astype(np.float64)
        following, advantage = 0.0, 0.0
        rewards = [0.0] * (values.size - 1) + [response.score.reward]
        expected: list[float] = []
        for value, reward in zip(values[::-1], rewards[::-1], strict=True):
            advantage = reward + 0.9 * following - value + 0.9 * 0.8 * advantage
            following = value
            expected.append(advantage)
        np.testing.assert_allclose(sample.advantages, expected[::-1], rtol=1e-5)


def test_staleness_is_told_of_tokens_that_carry_loss_and_of_all_where_none_does() -> None:
    result = StepResult(True, 0.25, 1.0, 1e-3, {}, 8)
    trained, masked = aged([2, 2, 5, 5], [False, False, True, True]), aged([3, 3, 4], [False] * 3)
    row = update_row(7, 7, [trained, masked], [result], VersionHistory())
    assert (row.staleness_mean, row.staleness_max) == (pytest.approx((1 + 1 + 3 + 3 + 2) / 5), 3)
    row = update_row(7, 7, [trained], [result], VersionHistory())
    assert (row.staleness_mean, row.staleness_max) == (1.0, 1)


def test_accuracy_and_each_part_of_the_reward_are_means_over_the_finished_responses() -> None:
    result = StepResult(True, 0.25, 1.0, 1e-3, {}, 8)
    right, wrong = aged([2], [True]), aged([2], [True])
    unfinished = replace(aged([2], [True]), is_finished=False)
    right = replace(right, reward=1.5, accuracy=1.0, reward_parts={"correct": 1.0, "style": 0.5})
    wrong = replace(wrong, reward=-1.0, reward_parts={"correct": -1.0})
    row = update_row(3, 3, [right, wrong, unfinished], [result], VersionHistory())
    assert row.reward_parts == {"correct": 0.0, "style": 0.25}
    assert sum(row.reward_parts.values()) == row.reward
    assert row.accuracy == 0.5


def test_a_response_of_several_sequences_counts_once_and_its_environments_tokens_apart() -> None:
    result = StepResult(True, 0.25, 1.0, 1e-3, {}, 8)
    first = replace(aged([2, 2, 2, 2], [True] * 4), reward=1.0, accuracy=1.0)
    first = replace(first, tokens=np.zeros(9, np.int32), places=np.array([2, 3, 6, 8]))
    second = replace(aged([3, 3], [True] * 2), reward=1.0, accuracy=1.0, part=1)
    other = aged([3], [True])
    row = update_row(3, 3, [first, second, other], [result], VersionHistory(), num_unjudged=2)
    assert (row.num_trajectories, row.reward, row.accuracy) == (2, 0.5, 0.5)
    assert (row.num_response_tokens, row.num_trained_tokens, row.response_length) == (7, 7, 3.5)
    assert row.metrics == {"environment_tokens": 3.0, "no_verdict_fraction": 0.5}
    assert sum(row.histograms["length"].counts) == 2
    assert "environment_tokens" not in update_row(3, 3, [other], [result], VersionHistory()).metrics


def test_an_updates_metrics_are_means_of_its_steps_but_extremes_stay_extremes() -> None:
    steps = (
        {"entropy": 0.25, "policy_ratio_max": 1.5, "log_perplexity_gap_max": 0.5, "log_perplexity_gap_min": -0.25},
        {"entropy": 0.75, "policy_ratio_max": 8.5, "log_perplexity_gap_max": 0.25, "log_perplexity_gap_min": -0.75},
    )
    results = [StepResult(True, 0.25, 1.0, 1e-3, metrics, 8) for metrics in steps]
    assert update_row(7, 7, [aged([2], [True])], results, VersionHistory()).metrics == {
        "entropy": 0.5,
        "policy_ratio_max": 8.5,
        "log_perplexity_gap_max": 0.5,
        "log_perplexity_gap_min": -0.75,
    }


def test_an_updates_metrics_are_weighted_by_what_its_steps_averaged_over() -> None:
    """A step of one long response counts as its tokens do; one without any, not at all."""
    names = ("policy_ratio", "perplexity_ratio", "nll", "policy_ratio_max")
    values = ((1.0, 1.0, 4.0, 2.0), (2.0, 3.0, 0.0, 3.0), (0.0, 0.0, 7.0, 0.0))
    counts = (MetricCounts(30, 1, 10), MetricCounts(10, 3, 0), MetricCounts(0, 0, 30))
    results = [
        StepResult(True, 0.25, 1.0, 1e-3, dict(zip(names, told, strict=True)), 8, counted)
        for told, counted in zip(values, counts, strict=True)
    ]
    assert update_row(7, 7, [aged([2], [True])], results, VersionHistory()).metrics == {
        "policy_ratio": 1.25,
        "perplexity_ratio": 2.5,
        "nll": (4.0 * 10 + 7.0 * 30) / 40,
        "policy_ratio_max": 3.0,
    }


def test_responses_without_guidance_are_a_share_of_those_of_a_rule_that_reads_it() -> None:
    results = [StepResult(True, 0.25, 1.0, 1e-3, {"flagged_fraction": 0.5}, 8)]
    windows = [replace(aged([2], [True]), is_unguided=told) for told in (True, False, False, False, None)]
    assert update_row(7, 7, windows, results, VersionHistory()).metrics == {
        "flagged_fraction": 0.5,
        "unguided_fraction": 0.25,
    }
    assert "unguided_fraction" not in update_row(7, 7, windows[-1:], results, VersionHistory()).metrics


def aged(versions: list[int], mask: list[bool]) -> TrainingSample:
    """A response to a prompt of two tokens, whose tokens are of ``versions``."""
    length = len(versions)
    return TrainingSample(
        name="t.0.0",
        tokens=np.zeros(2 + length, np.int32),
        prompt_length=2,
        loss_mask=np.array(mask),
        advantages=np.zeros(length, np.float32),
        behavior_logprobs=np.zeros(length, np.float32),
        versions=np.array(versions, np.int32),
    )


async def test_each_update_begins_from_the_version_that_the_learner_is_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The proximal policy is interpolated towards it; one version further and the newest tokens
    would count as old."""
    world = World(tmp_path, monkeypatch, num_updates=3)
    backend = RecordingTraining()
    monkeypatch.setattr(workers.learner.restore, "build_training_backend", lambda _: backend)
    assert await world.live(Reaper(None))
    before = [row.policy_version - 1 for row in world.rows()]
    assert len(before) == 3
    assert [rule.proximal_version for _, rule in backend.steps] == before
    for (samples, _), version in zip(backend.steps, before, strict=True):
        assert version - 1 <= min(int(sample.versions.min()) for sample in samples) <= version


@pytest.mark.parametrize("share", [0.0, 1.0])
async def test_the_check_of_log_probs_is_made_before_an_update_and_changes_no_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    world = World(tmp_path, monkeypatch, num_updates=3, sampler="generator-0#1")
    learner = world.config.learner.model_copy(update={"logprob_check_share": share})
    world.config = world.config.model_copy(update={"learner": learner})
    backend = RecordingTraining()
    monkeypatch.setattr(workers.learner.restore, "build_training_backend", lambda _: backend)
    assert await world.live(Reaper(None))
    trained = [[sample.name for sample in samples] for samples, _ in backend.steps]
    assert len(trained) == 3 and all(s.old_logprobs is None for samples, _ in backend.steps for s in samples)
    asked = [(num_steps, sorted(sample.name for sample in samples)) for num_steps, samples in backend.asked]
    expected = [(number, sorted(f"{name}.0" for name in names)) for number, names in enumerate(trained)]
    assert asked == (expected if share else [])
