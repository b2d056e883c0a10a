"""PPO, VAPO and T-PPO: whole responses and windows go through the same lines, and a critic is a
baseline only."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.algorithms.assemble import NonFiniteUnit
from pipeline.algorithms.batching import TrainingSample
from pipeline.algorithms.critic_rule import CriticRule
from pipeline.algorithms.ppo import Ppo
from pipeline.algorithms.tppo import Tppo
from pipeline.algorithms.vapo import Vapo
from pipeline.config.learning import Aggregation
from pipeline.ledger.types import ClaimedUnit, ScoredChunk, Unit
from protocol.errors import LedgerError
from protocol.trajectory import Field, FinishReason, RewardScore, Score, ValueScore
from tests.pipeline.algorithms.packed import few
from tests.pipeline.algorithms.value_units import (
    chunk_units,
    group_units,
    responses,
    trajectory_units,
    unfinished,
    with_values,
)
from tests.rules import make_rule, with_settings

SEEDS = st.integers(0, 2**32 - 1)
TPPO: Tppo = make_rule(Tppo, advantage_clamp=0.0, tail_drop_tokens=2, window_tokens=6)
RAW: Tppo = with_settings(TPPO, whiten=False)
PPO: Ppo = make_rule(Ppo, positive_nll_coefficient=0.1)
VAPO: Vapo = make_rule(Vapo, dynamic_sampling=True)


def _by_name(samples: list[TrainingSample]) -> dict[str, TrainingSample]:
    return {sample.name: sample for sample in samples}


def _same_bits(left: TrainingSample, right: TrainingSample, *, but: tuple[str, ...] = ()) -> None:
    for name in TrainingSample.__slots__:
        if name not in but:
            a, b = getattr(left, name), getattr(right, name)
            assert np.array_equal(a, b) if isinstance(a, np.ndarray) else a == b, name


def test_whitened_advantages_are_bounded_by_the_clamp_and_free_without_one() -> None:
    units = trajectory_units(responses(4), 6)

    def largest(clamp: float) -> float:
        return max(float(np.abs(s.advantages).max()) for s in with_settings(PPO, advantage_clamp=clamp).prepare(units))

    assert largest(0.5) == 0.5
    assert largest(0.0) > 1.5


@few
@given(SEEDS)
def test_a_window_as_long_as_the_cap_makes_t_ppo_ppo_bit_for_bit(seed: int) -> None:
    drawn = responses(seed)
    settings = {"adaptive_lambda_alpha": 0.05, "adaptive_lambda_floor": 0.95, "window_tokens": 20}
    windows = with_settings(TPPO, **settings).prepare(chunk_units(drawn, 20))
    whole = with_settings(PPO, **settings).prepare(trajectory_units(drawn, 20))
    assert len(windows) == len(whole) == len(drawn)
    for left, right in zip(windows, whole, strict=True):
        _same_bits(left, right, but=("name",))


@pytest.mark.parametrize("rule", [TPPO, with_settings(TPPO, whiten=False)], ids=["whitened", "raw"])
@few
@given(seed=SEEDS, order=st.randoms(use_true_random=False))
def test_the_order_in_which_chunks_arrive_changes_no_bit_of_any_sample(rule: CriticRule, seed: int, order) -> None:
    units = chunk_units(responses(seed), 6)
    shuffled = units.copy()
    order.shuffle(shuffled)
    expected = _by_name(rule.prepare(units))
    for sample in rule.prepare(shuffled):
        _same_bits(sample, expected[sample.name])


@few
@given(SEEDS)
def test_a_chunk_has_the_same_raw_advantages_whatever_chunks_came_with_it(seed: int) -> None:
    units = chunk_units(responses(seed), 6)
    together = _by_name(RAW.prepare(units))
    for unit in units:
        (alone,) = RAW.prepare([unit])
        np.testing.assert_array_equal(alone.advantages, together[alone.name].advantages)


def test_context_is_state_without_loss_but_in_an_imitated_window() -> None:
    drawn = [replace(r, tokens=np.arange(2, 16, dtype=np.int32)) for r in responses(5)]
    drawn = [
        replace(r, behavior_logprobs=np.full(14, -4.0, np.float32), values=np.zeros(14, np.float32)) for r in drawn
    ]
    for sample in TPPO.prepare(chunk_units(drawn, 6)):
        index = int(sample.name.rsplit(".", 1)[1].lstrip("c"))
        np.testing.assert_array_equal(sample.tokens[-(14 if index == 2 else 6 * (index + 1)) :][:3], [2, 3, 4])
        if sample.nll_mask is None:
            assert sample.response_length == (2 if index == 2 else 6)
            assert sample.num_context_tokens == 6 * index
            assert sample.is_finished is (index == 2)
        else:
            assert index == 2 and sample.accuracy == 1.0
            assert sample.response_length == 14 and sample.nll_mask.all()
            assert not sample.loss_mask[:12].any() and sample.loss_mask[12:].all()
            assert not sample.behavior_logprobs[:12].any()
            assert (sample.versions == 5).all()


@few
@given(SEEDS)
def test_unfinished_windows_lose_their_tail_and_still_count_it(seed: int) -> None:
    units = chunk_units(unfinished(responses(seed)), 6)
    samples = TPPO.prepare(units)
    lengths = [unit.trajectories[0][0].chunk.num_tokens for unit in units]
    for sample, length in zip(samples, lengths, strict=True):
        assert not sample.is_finished
        assert int(sample.loss_mask.sum()) == max(0, length - 2)
        assert not sample.advantages[~sample.loss_mask].any()
    counted = [sample.counted_tokens for sample in samples]
    assert sum(c for c in counted if c is not None) == pytest.approx(sum(lengths), rel=1e-12)
    weights = np.concatenate(TPPO.token_weights(samples))
    np.testing.assert_allclose(weights[weights > 0], 1.0 / sum(lengths), rtol=1e-12)


def test_a_token_weighs_the_same_in_whatever_mini_batch_it_falls() -> None:
    samples = TPPO.prepare(chunk_units(responses(3), 6))
    half = len(samples) // 2
    samples = samples[: 2 * half]
    for part in (samples[:half], samples[half:]):
        weights = np.concatenate(TPPO.token_weights(part))
        assert np.ptp(weights[weights > 0]) == 0.0
        np.testing.assert_allclose(weights.max(), np.concatenate(TPPO.token_weights(samples)).max() * 2)


def test_other_averages_count_each_window_by_its_own_tokens() -> None:
    rule = with_settings(TPPO, loss_aggregation=Aggregation.SEQ_MEAN_TOKEN_MEAN)
    units = chunk_units(unfinished(responses(8)), 6)
    for sample, unit in zip(rule.prepare(units), units, strict=True):
        assert sample.counted_tokens == unit.trajectories[0][0].chunk.num_tokens


@few
@given(SEEDS, st.floats(-1.0, 1.0))
def test_a_constant_critic_gives_unfinished_windows_no_advantage(seed: int, value: float) -> None:
    units = chunk_units(with_values(unfinished(responses(seed)), value), 6)
    for rule in (RAW, TPPO):
        for sample in rule.prepare(units):
            assert not sample.advantages.any()


@few
@given(SEEDS)
def test_a_batch_of_nothing_but_cut_windows_is_safe(seed: int) -> None:
    """Tiny differences of a flat critic stay tiny: the least std keeps them from becoming unit
    noise."""
    draw = np.random.default_rng(seed)
    drawn = [
        replace(r, values=(0.3 + 1e-5 * draw.normal(size=r.tokens.size)).astype(np.float32))
        for r in unfinished(responses(seed))
    ]
    for sample in TPPO.prepare(chunk_units(drawn, 6)):
        assert np.abs(sample.advantages).max() < 1e-3
        assert sample.nll_mask is None
    loud = with_settings(TPPO, whiten_min_std=0.0).prepare(chunk_units(drawn, 6))
    trained = np.concatenate([s.advantages[s.loss_mask] for s in loud])
    if trained.size > 20:
        assert np.abs(trained).max() > 0.03
    alone = TPPO.prepare(chunk_units(unfinished(responses(seed, longest=2)), 6))
    assert not any(sample.loss_mask.any() for sample in alone), "windows shorter than the tail train nothing"
    assert not any(w.any() for w in TPPO.token_weights(alone))


@few
@given(SEEDS)
def test_with_lambda_1_the_advantage_is_the_reward_less_the_value(seed: int) -> None:
    drawn = responses(seed)
    rule = with_settings(PPO, gae_lambda=1.0, whiten=False, advantage_clamp=0.0)
    for sample, response in zip(rule.prepare(trajectory_units(drawn, 6)), drawn, strict=True):
        np.testing.assert_allclose(sample.advantages, response.score.reward - response.values, atol=1e-5)


@few
@given(SEEDS)
def test_with_lambda_0_the_advantage_is_one_difference_of_values(seed: int) -> None:
    drawn = responses(seed)
    rule = with_settings(PPO, gae_lambda=0.0, whiten=False, advantage_clamp=0.0)
    for sample, response in zip(rule.prepare(trajectory_units(drawn, 6)), drawn, strict=True):
        expected = np.append(response.values[1:], response.score.reward) - response.values
        np.testing.assert_allclose(sample.advantages, expected, atol=1e-6)


def test_lambda_counts_the_whole_response_and_half_a_window_more_while_it_goes_on() -> None:
    drawn = [replace(r, is_finished=False) for r in responses(1, longest=20)]
    rule = with_settings(TPPO, adaptive_lambda_floor=0.0, adaptive_lambda_alpha=1.0)
    for response in drawn:
        (unit,) = trajectory_units([response], 20)
        whole = ClaimedUnit(name="x", trajectories=(unit.trajectories[0],))
        (stretch,) = rule.token_spans(whole)
        assert rule.policy_lambda(stretch) == pytest.approx(1 - 1 / (response.tokens.size + 3))
    done = responses(1)
    for response in done:
        last = chunk_units([response], 6)[-1]
        (stretch,) = rule.token_spans(last)
        assert rule.policy_lambda(stretch) == pytest.approx(1 - 1 / response.tokens.size)
        assert PPO.policy_lambda(stretch) == 0.95


def test_vapo_on_groups_is_vapo_on_trajectories_with_a_lambda_that_is_never_negative() -> None:
    drawn = responses(4)
    grouped = VAPO.prepare(group_units(drawn, 6))
    single = with_settings(VAPO, unit=Unit.TRAJECTORY).prepare(trajectory_units(drawn, 6))
    for left, right in zip(grouped, single, strict=True):
        _same_bits(left, right)
    (stretch,) = VAPO.token_spans(trajectory_units(drawn[:1], 6)[0])
    assert VAPO.policy_lambda(stretch) == 0.0, "a response under 20 tokens"


def test_only_right_responses_are_imitated_and_none_without_the_coefficient() -> None:
    drawn = responses(2)
    for sample in PPO.prepare(trajectory_units(drawn, 6)):
        assert (sample.nll_mask is not None) is (sample.accuracy == 1.0)
    silent = with_settings(PPO, positive_nll_coefficient=0.0)
    assert all(sample.nll_mask is None for sample in silent.prepare(trajectory_units(drawn, 6)))


@pytest.mark.parametrize("rule", [PPO, TPPO], ids=["ppo", "tppo"])
def test_an_over_long_response_under_filtering_trains_nothing_and_counts_nothing(rule: CriticRule) -> None:
    drawn = responses(6)
    drawn[0] = replace(drawn[0], score=RewardScore(reward=1.0, accuracy=1.0, masked=True))
    units = trajectory_units(drawn, 20) if rule is PPO else chunk_units(drawn, 20)
    samples = rule.prepare(units)
    assert not samples[0].loss_mask.any()
    assert samples[0].nll_mask is None
    rest = sum(r.tokens.size for r in drawn[1:])
    assert sum(s.counted_tokens or 0.0 for s in samples) == pytest.approx(rest)


# -- what is refused -------------------------------------------------------------------------------


def _chunk(unit: ClaimedUnit, **changes: object) -> ClaimedUnit:
    ((scored,),) = unit.trajectories
    return replace(
        unit, trajectories=((ScoredChunk(msgspec.structs.replace(scored.chunk, **changes), scored.scores),),)
    )


def _scores(unit: ClaimedUnit, **changes: Score | None) -> ClaimedUnit:
    ((scored,),) = unit.trajectories
    scores = scored.scores | {Field(name): score for name, score in changes.items() if score is not None}
    for name in (name for name, score in changes.items() if score is None):
        scores.pop(Field(name))
    return replace(unit, trajectories=((replace(scored, scores=scores),),))


UNIT = chunk_units(responses(9), 20)[1]
LENGTH = UNIT.trajectories[0][0].chunk.num_tokens


@pytest.mark.parametrize(
    ("unit", "message"),
    [
        (_scores(UNIT, value=None), "has no values"),
        (_scores(UNIT, reward=None), "expected a reward on final chunks only"),
        (_chunk(UNIT, finish_reason=FinishReason.WINDOW), "expected a reward on final chunks only"),
        (_scores(UNIT, value=ValueScore(values=np.zeros(LENGTH + 1, np.float32), value_version=0)), "one per token"),
        (_chunk(UNIT, segments=()), "segments for 0 tokens"),
        (replace(UNIT, trajectories=()), "expected one that was not aborted"),
        (_chunk(_scores(UNIT, reward=None), finish_reason=FinishReason.ABORT), "not aborted"),
    ],
)
def test_a_chunk_that_breaks_the_promises_of_the_ledger_is_refused(unit: ClaimedUnit, message: str) -> None:
    with pytest.raises(LedgerError, match=message) as caught:
        TPPO.prepare([unit])
    assert UNIT.name in str(caught.value)


@pytest.mark.parametrize(
    ("unit", "what"),
    [
        (_scores(UNIT, value=ValueScore(values=np.full(LENGTH, np.nan, np.float32), value_version=0)), "values"),
        (_scores(UNIT, reward=RewardScore(reward=float("inf"), accuracy=0.0)), "reward"),
        (_chunk(UNIT, behavior_logprobs=np.full(LENGTH, -np.inf, np.float32)), "behavior_logprobs"),
    ],
)
def test_what_is_not_finite_is_named_and_never_trained_on(unit: ClaimedUnit, what: str) -> None:
    for rule in (TPPO, PPO):
        with pytest.raises(NonFiniteUnit, match=what) as caught:
            rule.prepare([chunk_units(responses(10), 20)[0], unit])
        assert caught.value.unit == UNIT.name


def test_missing_values_and_reference_log_probs_are_refused_on_whole_responses() -> None:
    (unit,) = trajectory_units(responses(9)[:1], 6)
    (chunks,) = unit.trajectories
    for field, message in ((Field.VALUE, "lacks values"), (Field.REFERENCE, "lacks reference log-probs")):
        bare = replace(chunks[0], scores={k: v for k, v in chunks[0].scores.items() if k is not field})
        rule = replace(PPO, fields=frozenset(Field))
        with pytest.raises(LedgerError, match=message):
            rule.prepare([replace(unit, trajectories=((bare, *chunks[1:]),))])


def test_the_parts_of_a_reward_reach_the_samples_of_every_rule() -> None:
    drawn = [replace(one, score=msgspec.structs.replace(one.score, parts={"style": 0.5})) for one in responses(3)]
    dapo = make_rule(group_size=4)
    units = {PPO: trajectory_units(drawn, 6), TPPO: chunk_units(drawn, 6), VAPO: group_units(drawn, 6)}
    for rule, of_rule in (*units.items(), (dapo, group_units(drawn, 6))):
        samples = rule.prepare(of_rule)
        assert {tuple(s.reward_parts.items()) for s in samples if s.is_finished} == {(("style", 0.5),)}
