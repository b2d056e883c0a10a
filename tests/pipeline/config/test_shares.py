"""Which settings of DeepSpeed leave its shares where snapshots can take them."""

from __future__ import annotations

from typing import Any

import pytest

from pipeline.config.learning import DeepSpeedSection, LearnerSection
from pipeline.config.shares import gathered_ranks, lends_shares


@pytest.mark.parametrize(
    ("settings", "is_lent"),
    [
        ({}, True),
        ({"stage": 3, "zero_optimization": {"overlap_comm": True}, "config": {"wall_clock_breakdown": True}}, True),
        ({"offload_optimizer": {"device": "cpu"}}, False),
        ({"stage": 3, "offload_param": {"device": "cpu"}}, False),
        ({"zero_optimization": {"overlap_comm": True, "mics_shard_size": 2}}, False),
        ({"config": {"data_types": {"grad_accum_dtype": "bf16"}}}, False),
    ],
)
def test_shares_are_lent_by_settings_that_are_known_to_leave_them_alone(
    settings: dict[str, Any], is_lent: bool
) -> None:
    zero = DeepSpeedSection.model_validate(settings)
    assert lends_shares(zero) is is_lent
    learner = {"backend": "deepspeed", "ranks": 4, "deepspeed": settings}
    assert gathered_ranks(LearnerSection.model_validate(learner)) == (1 if is_lent else 4)
    assert gathered_ranks(LearnerSection.model_validate({**learner, "backend": "fsdp2"})) == 1
    assert gathered_ranks(LearnerSection.model_validate({**learner, "backend": "fsdp2", "tensor_parallel": 2})) == 4
