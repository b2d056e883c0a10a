"""DAPO turns complete groups into samples, and refuses units that the ledger never promised."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from pipeline.algorithms import NonFiniteUnit, build
from pipeline.algorithms.dapo import Dapo
from pipeline.config.learning import Importance, KLEstimator, algorithm_settings
from pipeline.config.schema import RunConfig
from pipeline.config.training import DataSection, ModelSection
from pipeline.ledger.types import ClaimedUnit, ScoredChunk, Unit
from protocol.errors import LedgerError
from protocol.trajectory import Field, FinishReason, RewardScore
from tests.pipeline.algorithms.units import PROMPT, group_unit, reward, trajectory
from tests.rules import make_rule

RULE = make_rule(group_size=4)
WITH_REFERENCE = replace(RULE, fields=frozenset({Field.REWARD, Field.REFERENCE}))


def _altered(unit: ClaimedUnit, member: int, index: int, **changes: object) -> ClaimedUnit:
    """Return the unit with one chunk changed."""
    chunks = list(unit.trajectories[member])
    scored = chunks[index]
    chunks[index] = replace(scored, chunk=msgspec.structs.replace(scored.chunk, **changes))
    return _with_member(unit, member, tuple(chunks))


def _with_member(unit: ClaimedUnit, member: int, chunks: tuple[ScoredChunk, ...]) -> ClaimedUnit:
    members = list(unit.trajectories)
    members[member] = chunks
    return replace(unit, trajectories=tuple(members))


def test_a_response_of_several_chunks_becomes_one_sequence() -> None:
    sample = RULE.prepare([group_unit([1.0, -1.0, -1.0, 1.0])])[2]
    assert sample.name == "t.4.2"
    assert sample.prompt_length == PROMPT.tokens.size
    np.testing.assert_array_equal(sample.tokens, [7, 8, 10, 11, 20, 21, 22])
    np.testing.assert_allclose(sample.behavior_logprobs, [-1.0, -1.1, -2.0, -2.1, -2.2], rtol=1e-6)
    np.testing.assert_array_equal(sample.versions, [3, 3, 4, 4, 4])
    assert sample.loss_mask.all()
    assert sample.old_logprobs is None
    assert (sample.reward, sample.accuracy) == (-1.0, 0.0)


def test_every_token_of_a_response_carries_the_advantage_of_its_group() -> None:
    samples = RULE.prepare(
        [group_unit([1.0, -1.0, -1.0, -1.0], number=4), group_unit([1.0, 1.0, -1.0, -1.0], number=5)]
    )
    assert [sample.name for sample in samples] == [f"t.{g}.{m}" for g in (4, 5) for m in range(4)]
    first = [1.5, -0.5, -0.5, -0.5]
    second = [np.sqrt(0.75), np.sqrt(0.75), -np.sqrt(0.75), -np.sqrt(0.75)]
    for sample, expected in zip(samples, [*first, *second], strict=True):
        assert sample.advantages.dtype == np.float32
        np.testing.assert_allclose(sample.advantages, np.full(sample.response_length, expected), rtol=2e-6)


def test_a_filtered_over_long_response_counts_in_its_group_and_carries_no_loss() -> None:
    unit = group_unit([1.0, -1.0, 1.0, -1.0])
    cut = trajectory(3, [[10, 11], [20]], reward(-1.0, masked=True))
    samples = RULE.prepare([_with_member(unit, 3, cut)])
    assert [bool(sample.loss_mask.any()) for sample in samples] == [True, True, True, False]
    assert samples[0].advantages[0] == pytest.approx(RULE.prepare([unit])[0].advantages[0])


def test_reference_log_probs_are_joined_over_chunks() -> None:
    unit = group_unit([1.0, -1.0, 1.0, -1.0], with_reference=True)
    for sample in WITH_REFERENCE.prepare([unit]):
        assert sample.reference_logprobs is not None
        np.testing.assert_allclose(sample.reference_logprobs, sample.behavior_logprobs - 0.5, rtol=1e-6)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_unit_with_a_value_that_is_not_finite_is_named(value: float) -> None:
    good, bad = group_unit([1.0, -1.0, 1.0, -1.0], number=4), group_unit([1.0, -1.0, 1.0, -1.0], number=5)
    broken = _altered(bad, 1, 0, behavior_logprobs=np.array([-1.0, value], dtype=np.float32))
    with pytest.raises(NonFiniteUnit, match=r"behavior_logprobs of trajectory t\.5\.1") as caught:
        RULE.prepare([good, broken])
    assert caught.value.unit == "5"


def test_a_reward_that_is_not_finite_is_never_trained_on() -> None:
    unit = _with_member(group_unit([1.0] * 4), 2, trajectory(2, [[10]], reward(float("nan"))))
    with pytest.raises(NonFiniteUnit, match="reward"):
        RULE.prepare([unit])


def test_a_part_of_a_group_is_refused() -> None:
    unit = group_unit([1.0, -1.0, 1.0, -1.0])
    with pytest.raises(LedgerError, match="3 responses; expected 4"):
        RULE.prepare([replace(unit, trajectories=unit.trajectories[:3])])


def test_missing_reference_log_probs_are_refused_when_they_are_needed() -> None:
    with pytest.raises(LedgerError, match="has no reference log-probs"):
        WITH_REFERENCE.prepare([group_unit([1.0, -1.0, 1.0, -1.0])])


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda u: _with_member(u, 0, ()), "without chunks"),
        (lambda u: _with_member(u, 0, u.trajectories[0][1:]), "expected every chunk of one trajectory"),
        (lambda u: _with_member(u, 0, (u.trajectories[0][0], u.trajectories[1][1])), "expected every chunk"),
        (lambda u: _altered(u, 0, 1, finish_reason=FinishReason.WINDOW), "expected stop or length"),
        (lambda u: _altered(u, 0, 0, tokens=np.array([10, 99], dtype=np.int32)), "has different tokens"),
        (lambda u: _altered(u, 0, 1, segments=()), "segments for 0 tokens"),
    ],
)
def test_a_unit_that_breaks_the_promises_of_the_ledger_is_refused(break_it, message: str) -> None:
    with pytest.raises(LedgerError, match=message) as caught:
        RULE.prepare([break_it(group_unit([1.0, -1.0, 1.0, -1.0]))])
    assert "unit 4" in str(caught.value)


def test_preparing_twice_gives_the_same_samples() -> None:
    units = [group_unit([1.0, -0.5, 1.0, -1.0])]
    for one, other in zip(RULE.prepare(units), RULE.prepare(units), strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)
        np.testing.assert_array_equal(one.advantages, other.advantages)


def test_a_configuration_decides_the_whole_rule() -> None:
    section = algorithm_settings(
        group_size=8,
        kl_coefficient=0.2,
        kl_estimator="k1+",
        importance="icepop",
        loss_aggregation="seq-mean-token-sum-norm",
        dynamic_sampling=False,
        normalize_std=False,
    )
    rule = build(
        RunConfig(model=ModelSection(path=Path("m")), data=DataSection(train=(Path("d.jsonl"),)), algorithm=section)
    )
    assert isinstance(rule, Dapo)
    assert (rule.name, rule.unit, rule.settings.group_size) == ("dapo", Unit.GROUP, 8)
    assert rule.fields == {Field.REWARD, Field.REFERENCE}
    assert not rule.signal_filter
    assert not rule.settings.normalize_std
    assert (rule.needs_reference, rule.settings.kl_estimator) == (True, KLEstimator.K1_STRAIGHT)
    assert rule.sampled.importance is Importance.ICEPOP
    assert (rule.settings.loss_aggregation, rule.norm_length) == ("seq-mean-token-sum-norm", 2048.0)


def test_a_score_keeps_its_own_accuracy_whatever_the_reward() -> None:
    shaped = RewardScore(reward=0.4, accuracy=1.0, parts={"correct": 1.0, "overlong": -0.6})
    unit = _with_member(group_unit([1.0, -1.0, 1.0, -1.0]), 0, trajectory(0, [[10, 11], [20]], shaped))
    sample = RULE.prepare([unit])[0]
    assert (sample.reward, sample.accuracy) == (0.4, 1.0)
