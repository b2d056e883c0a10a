"""Rules on single responses: which response trains by which verdict, and what guidance they get."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pipeline.algorithms import Rule, build
from pipeline.algorithms.batching import TrainingSample
from pipeline.algorithms.critic_rule import CriticRule
from pipeline.config.load import load_config
from pipeline.ledger.types import ClaimedUnit, Unit
from protocol.errors import ConfigError
from protocol.trajectory import Field, GuidanceScore, RewardScore
from tests.pipeline.algorithms.units import reward, trajectory
from tests.pipeline.algorithms.value_units import chunk_units, responses, trajectory_units, with_guidance

STANDARD = np.array([-0.1, -0.2, -0.3], np.float32)
JUDGE = np.array([-1.0, -0.01, -2.0], np.float32)
NOTHING = np.empty(0, np.float32)


def _unit(score: RewardScore, standard: np.ndarray = STANDARD, judge: np.ndarray = JUDGE) -> ClaimedUnit:
    first, last = trajectory(0, [[10, 11], [20]], score)
    guidance = GuidanceScore(standard_logprobs=standard, judge_logprobs=judge, guide_version="v")
    chunks = (first, replace(last, scores={**last.scores, Field.GUIDANCE: guidance}))
    return ClaimedUnit(name="t.4.0", trajectories=(chunks,))


UNITS = {
    "right": _unit(reward(1.0), judge=NOTHING),
    "right, unguided": _unit(reward(1.0), NOTHING, NOTHING),
    "wrong": _unit(reward(-1.0)),
    "wrong, no judgment": _unit(reward(-1.0), judge=NOTHING),
    "wrong, no gold text": _unit(reward(-1.0), NOTHING),
    "over-long": _unit(reward(1.0, masked=True)),
}


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text('[model]\npath = "m"\n[data]\ntrain = ["d.jsonl"]\n')
    return path


def _rule(run_file: Path, name: str, *more: str) -> Rule:
    return build(load_config([run_file], [f"algorithm.name={name}", *more]))


def _verdicts(samples: Sequence[TrainingSample]) -> list[float]:
    for sample in samples:
        assert (sample.loss_mask == (sample.advantages != 0.0)).all()
        assert np.ptp(sample.advantages) == 0.0
    return [float(sample.advantages[0]) for sample in samples]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("nlft", [1, 1, -1, 0, 0, 0]),
        ("nlft-first", [1, 1, -1, 0, 0, 0]),
        ("sft", [1, 1, 1, 1, 1, 0]),
        ("rft", [1, 1, 0, 0, 0, 0]),
    ],
)
def test_each_rule_gives_each_kind_of_response_its_verdict(run_file: Path, name: str, expected: list[int]) -> None:
    assert _verdicts(_rule(run_file, name).prepare(list(UNITS.values()))) == expected


def test_columns_are_those_of_the_verdict(run_file: Path) -> None:
    samples = _rule(run_file, "nlft").prepare(list(UNITS.values()))
    found = dict(zip(UNITS, samples, strict=True))
    np.testing.assert_array_equal(found["right"].standard_logprobs, STANDARD)
    assert found["right"].judge_logprobs is None
    np.testing.assert_array_equal(found["wrong"].standard_logprobs, STANDARD)
    np.testing.assert_array_equal(found["wrong"].judge_logprobs, JUDGE)
    for kind in ("right, unguided", "wrong, no judgment", "wrong, no gold text"):
        assert found[kind].standard_logprobs is found[kind].judge_logprobs is None
    assert [sample.is_unguided for sample in samples] == [False, True, False, True, True, False]
    assert all(sample.is_unguided is None for sample in _rule(run_file, "sft").prepare(list(UNITS.values())))


def test_guidance_of_a_window_is_that_of_its_own_tokens(run_file: Path) -> None:
    rule = _rule(run_file, "tppo", "algorithm.guidance=mix", "generation.window_tokens=12")
    assert isinstance(rule, CriticRule) and Field.GUIDANCE in rule.fields
    drawn = with_guidance(responses(3))
    whole = {f"t.{r.group}.{r.member}": r for r in drawn}
    for sample in rule.prepare(chunk_units(drawn, 6)):
        response = whole[sample.name.rpartition(".")[0]]
        guidance = response.guidance
        assert guidance is not None
        if not sample.is_finished:
            assert sample.standard_logprobs is sample.is_unguided is None
        elif sample.standard_logprobs is not None:
            end = guidance.standard_logprobs[-sample.response_length :]
            np.testing.assert_array_equal(sample.standard_logprobs, end)
        else:
            assert sample.is_unguided and not guidance.standard_logprobs.size


def test_a_whole_response_with_a_critic_has_all_its_guidance(run_file: Path) -> None:
    drawn = with_guidance(responses(3))
    rule = _rule(run_file, "ppo", "algorithm.guidance=mix")
    for sample, response in zip(rule.prepare(trajectory_units(drawn, 6)), drawn, strict=True):
        assert response.guidance is not None
        columns = NOTHING if sample.standard_logprobs is None else sample.standard_logprobs
        np.testing.assert_array_equal(columns, response.guidance.standard_logprobs)
        assert (sample.judge_logprobs is not None) == bool(response.guidance.judge_logprobs.size)


@pytest.mark.parametrize("name", ["nlft", "nlft-first", "sft", "rft"])
def test_a_name_brings_single_responses_of_equal_weight(run_file: Path, name: str) -> None:
    config = load_config([run_file], [f"algorithm.name={name}"])
    rule = build(config)
    algorithm = config.algorithm
    assert (rule.unit, rule.signal_filter, algorithm.group_size) == (Unit.TRAJECTORY, False, 1)
    assert (rule.sampled.importance, algorithm.loss_aggregation) == ("none", "seq-mean-token-mean")
    assert (Field.GUIDANCE in rule.fields) == config.needs_guidance == name.startswith("nlft")


def test_constants_of_the_guidance_section_reach_the_loss(run_file: Path) -> None:
    rule = _rule(run_file, "nlft", "guidance.judge_ratio=2.5", "guidance.nll_coefficient=0.25")
    assert (rule.guidance.judge_ratio, rule.guidance.nll_coefficient) == (2.5, 0.25)
    assert not rule.mixes_guidance
    assert _rule(run_file, "dapo", "algorithm.guidance=mix").mixes_guidance


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["name=nlft", "importance=tis"], "`algorithm.importance` .* it belongs to dapo, grpo"),
        (["name=sft", "rejection=k1", "rejection_upper=2.0"], "`algorithm.rejection` .* has no such setting"),
        (["name=sft", "guidance=mix"], "`algorithm.guidance` .* has no such setting"),
        (["name=sft", "surrogate=nlft"], "no longer exists: a rule has its own loss"),
        (["name=dapo", "surrogate=gspo"], "set algorithm.name to gspo or cispo"),
    ],
)
def test_settings_that_contradict_the_rule_are_refused(run_file: Path, settings: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config([run_file], [f"algorithm.{setting}" for setting in settings])


def test_clusters_reach_the_loss_of_the_rules_that_have_them(run_file: Path) -> None:
    for name, has_clusters in (("nlft", True), ("nlft-first", True), ("sft", False)):
        asked = ["guidance.clusters=true", "guidance.cluster_distance=0.2", "guidance.dissimilar_clusters=true"]
        objective = build(load_config([run_file], [f"algorithm.name={name}", *asked]))
        assert objective.needs_states is has_clusters
        if has_clusters:
            assert (objective.guidance.cluster_distance, objective.guidance.dissimilar_clusters) == (0.2, True)
        assert not build(load_config([run_file], [f"algorithm.name={name}"])).needs_states
