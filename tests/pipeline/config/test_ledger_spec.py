"""From a run's configuration to its ledger: unit, fields and filters follow from the algorithm."""

from typing import NamedTuple

import pytest

from pipeline.config.ledger_spec import ledger_spec
from pipeline.config.schema import RunConfig
from pipeline.ledger.types import Unit
from pipeline.ledger.validation import check_spec
from protocol.trajectory import Field


class Stream(NamedTuple):
    digest: str = "d"
    num_prompts: int = 10


STREAM = Stream()


def spec_of(name, *, kl=0.0, **algorithm):
    settings = {"name": name, "group_size": 4, "groups_per_update": 2, "kl_coefficient": kl, "dynamic_sampling": False}
    config = RunConfig.model_validate(
        {"model": {"path": "model"}, "data": {"train": ["train.jsonl"]}, "algorithm": settings | algorithm}
    )
    spec = ledger_spec(config, STREAM)
    check_spec(spec)
    return spec


@pytest.mark.parametrize(
    "name", ["dapo", "grpo", "dr-grpo", "rloo", "reinforce++", "reinforce++-baseline", "gspo", "cispo"]
)
def test_without_a_critic_groups_need_their_reward_and_nothing_is_kept_for_one(name):
    spec = spec_of(name)
    assert (spec.unit, spec.fields, spec.value_training) == (Unit.GROUP, {Field.REWARD}, False)
    assert spec.units_per_update == 8


@pytest.mark.parametrize(("name", "unit"), [("ppo", Unit.TRAJECTORY), ("vapo", Unit.TRAJECTORY), ("tppo", Unit.CHUNK)])
def test_a_critic_needs_values_and_what_it_learns_from_is_kept(name, unit):
    spec = spec_of(name)
    assert (spec.unit, spec.fields) == (unit, {Field.REWARD, Field.VALUE})
    assert spec.value_training
    assert not spec.signal_filter


def test_vapo_with_dynamic_sampling_claims_groups_and_filters_them():
    spec = spec_of("vapo", dynamic_sampling=True)
    assert (spec.unit, spec.signal_filter, spec.value_training) == (Unit.GROUP, True, True)


def test_reference_log_probs_are_asked_for_by_settings():
    assert spec_of("tppo", kl=0.1).fields == {Field.REWARD, Field.VALUE, Field.REFERENCE}
