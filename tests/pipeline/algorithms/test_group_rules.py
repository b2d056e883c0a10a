"""Each rule without a critic is one equation from rewards to advantages, in DAPO's frame."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.algorithms import build
from pipeline.algorithms.batching import TrainingSample
from pipeline.algorithms.cispo import Cispo
from pipeline.algorithms.dapo import Dapo
from pipeline.algorithms.group_rule import GroupRule
from pipeline.algorithms.grpo import DrGrpo, Grpo
from pipeline.algorithms.gspo import Gspo
from pipeline.algorithms.reinforce import ReinforcePlusPlus, ReinforcePlusPlusBaseline
from pipeline.algorithms.rloo import Rloo
from pipeline.config.learning import Aggregation, algorithm_settings
from pipeline.config.schema import RunConfig
from pipeline.config.training import DataSection, ModelSection
from pipeline.ledger.types import ClaimedUnit
from protocol.errors import LedgerError
from tests.pipeline.algorithms.packed import few
from tests.pipeline.algorithms.units import group_unit
from tests.rules import make_rule

REWARDS = ([1.0, -1.0, -1.0, 0.5], [1.0, 1.0, -1.0, 1.0])
UNITS = [group_unit(rewards, number=number) for number, rewards in enumerate(REWARDS)]


def _first(samples: list[TrainingSample]) -> list[float]:
    return [float(sample.advantages[0]) for sample in samples]


def _built(name: str, **settings: object) -> GroupRule:
    section = algorithm_settings(name=name, group_size=4, **settings)
    data = DataSection(train=(Path("d.jsonl"),))
    rule = build(RunConfig(model=ModelSection(path=Path("m")), data=data, algorithm=section))
    assert isinstance(rule, GroupRule)
    return rule


@pytest.mark.parametrize("kind", [Dapo, Grpo, Gspo, Cispo])
def test_normalised_groups_have_mean_0_and_unbiased_std_1(kind: type[GroupRule]) -> None:
    advantages = np.array(_first(make_rule(kind, group_size=4).prepare(UNITS))).reshape(2, 4)
    np.testing.assert_allclose(advantages.mean(axis=1), 0.0, atol=1e-6)
    np.testing.assert_allclose(advantages.std(axis=1, ddof=1), 1.0, atol=1e-5)


def _without_verdict(unit: ClaimedUnit, *members: int) -> ClaimedUnit:
    bare = [
        (*chunks[:-1], replace(chunks[-1], scores={})) if member in members else chunks
        for member, chunks in enumerate(unit.trajectories)
    ]
    return replace(unit, trajectories=tuple(bare))


@pytest.mark.parametrize("kind", [Dapo, Grpo, Gspo, Cispo, Rloo])
def test_a_response_without_a_verdict_has_no_part_in_its_groups_mean_and_deviation_and_no_sample(
    kind: type[GroupRule],
) -> None:
    with_it = group_unit([1.0, -1.0, 0.5, 1.0])
    found = make_rule(kind, group_size=4).prepare([_without_verdict(with_it, 1)])
    rest = replace(with_it, trajectories=tuple(one for at, one in enumerate(with_it.trajectories) if at != 1))
    alone = make_rule(kind, group_size=3).prepare([rest])
    assert [sample.name for sample in found] == ["t.4.0", "t.4.2", "t.4.3"]
    assert _first(found) == _first(alone)


def test_a_group_with_one_verdict_alone_is_refused() -> None:
    with pytest.raises(LedgerError, match="1 verdicts; expected 2"):
        make_rule(Dapo, group_size=4).prepare([_without_verdict(UNITS[0], 0, 1, 2)])


def test_dr_grpo_only_takes_the_mean_off() -> None:
    assert _first(_built("dr-grpo").prepare(UNITS)) == pytest.approx(
        [1.125, -0.875, -0.875, 0.625, 0.5, 0.5, -1.5, 0.5]
    )


def test_rloo_compares_with_the_mean_of_the_others() -> None:
    expected = [reward - (sum(group) - reward) / 3 for group in REWARDS for reward in group]
    assert _first(make_rule(Rloo, group_size=4).prepare(UNITS)) == pytest.approx(expected)


@pytest.mark.parametrize("kind", [ReinforcePlusPlus, ReinforcePlusPlusBaseline])
def test_batch_whitening_gives_the_tokens_mean_0_and_std_1(kind: type[GroupRule]) -> None:
    samples = make_rule(kind, group_size=4).prepare(UNITS)
    tokens = np.concatenate([sample.advantages for sample in samples])
    assert tokens.mean() == pytest.approx(0.0, abs=1e-6)
    assert tokens.std(ddof=1) == pytest.approx(1.0, abs=1e-5)


def test_reward_to_go_is_discounted_by_the_tokens_that_follow() -> None:
    rule = make_rule(ReinforcePlusPlus, group_size=4, gamma=0.5)
    samples = rule.prepare(UNITS)
    for sample, reward in zip(samples, [r for group in REWARDS for r in group], strict=True):
        steps = np.diff(sample.advantages)
        assert (np.sign(steps) == np.sign(reward)).all()
        np.testing.assert_allclose(steps[1:], 2.0 * steps[:-1], rtol=1e-4)


@few
@given(st.permutations(range(2)))
def test_the_order_of_groups_changes_no_bit(order: list[int]) -> None:
    for name in ("dapo", "rloo", "reinforce++", "reinforce++-baseline"):
        rule = _built(name)
        expected = {sample.name: sample.advantages for sample in rule.prepare(UNITS)}
        for sample in rule.prepare([UNITS[i] for i in order]):
            np.testing.assert_array_equal(sample.advantages, expected[sample.name])


def test_a_name_brings_the_settings_of_its_source_and_each_can_still_be_given() -> None:
    gspo = _built("gspo")
    assert isinstance(gspo, Gspo)
    assert (gspo.settings.clip_low, gspo.settings.clip_high) == (3e-4, 4e-4)
    assert gspo.settings.loss_aggregation == Aggregation.SEQ_MEAN_TOKEN_MEAN
    wider = _built("gspo", clip_high=0.01)
    assert isinstance(wider, Gspo) and wider.settings.clip_high == 0.01
    assert isinstance(_built("cispo"), Cispo)
    dr_grpo = _built("dr-grpo")
    assert isinstance(dr_grpo, DrGrpo) and not dr_grpo.settings.normalize_std
    assert not _built("grpo").signal_filter
    assert _built("dapo").signal_filter
    assert _built("dapo").settings == make_rule(name="dapo", group_size=4).settings


def test_right_responses_can_be_imitated_without_a_critic_too() -> None:
    masks = [s.nll_mask for s in _built("grpo", positive_nll_coefficient=0.1).prepare(UNITS)]
    assert [mask is not None for mask in masks] == [r > 0 for group in REWARDS for r in group]
    assert all(s.nll_mask is None for s in _built("grpo").prepare(UNITS))
