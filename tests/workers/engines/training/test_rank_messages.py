"""Messages to ranks arrive as they were: values, arrays, types. Nothing else can be sent."""

from __future__ import annotations

import math
from dataclasses import fields, replace

import numpy as np
import pytest

from pipeline.algorithms.batching import TrainingSample
from pipeline.config.learning import KLEstimator
from pipeline.training.spikes import StepLimits
from tests.rules import make_rule
from tests.workers.engines.tiny import make_samples
from workers.engines.scoring.seam import ScoringRequest
from workers.engines.training.ranks.messages import (
    Command,
    Evaluate,
    Gather,
    Idle,
    Put,
    SentRule,
    Step,
    Stop,
    ValueStep,
    decode,
    encode,
)
from workers.engines.value.seam import ValueSample


def told(command: Command) -> Command:
    return decode(np.frombuffer(bytearray(encode(command)), np.uint8))


@pytest.mark.parametrize(
    "command", [Idle(), Stop(), Gather(["a.weight"], True), Put(3, ["a.weight"], {"exp_avg": ["a.weight"]})]
)
def test_plain_commands_arrive_as_they_were(command: Command) -> None:
    assert told(command) == command


@pytest.mark.parametrize("with_old", [True, False])
def test_samples_and_rule_arrive_with_every_array_and_its_type(with_old: bool) -> None:
    samples = make_samples(9, with_old=with_old)
    column = np.full(samples[0].response_length, -0.5, np.float32)
    samples[0] = replace(samples[0], standard_logprobs=column, judge_logprobs=2 * column, is_unguided=False)
    samples[1] = replace(samples[1], places=np.arange(samples[1].response_length) + samples[1].prompt_length, part=2)
    rule = make_rule(
        kl_estimator=KLEstimator.K2,
        kl_coefficient=0.25,
        proximal_version=7,
        constants={"judge_ratio": 2.5},
        guidance="mix",
    )
    got = told(Step(samples, SentRule.of(rule), StepLimits(2.5)))
    assert isinstance(got, Step)
    assert got.rule.rule() == rule
    assert got.limits == StepLimits(2.5, math.inf)
    for left, right in zip(samples, got.samples, strict=True):
        for field in fields(TrainingSample):
            expected, value = getattr(left, field.name), getattr(right, field.name)
            if isinstance(expected, np.ndarray):
                assert value.dtype == expected.dtype
                np.testing.assert_array_equal(value, expected)
            else:
                assert value == expected


def test_numbers_of_numpy_arrive_as_numbers() -> None:
    sample = ValueSample("t.0.0", np.arange(5, dtype=np.int32), 2, np.ones(3, np.float32), np.float32(0.5))  # pyright: ignore[reportArgumentType]
    got = told(ValueStep([sample]))
    assert isinstance(got, ValueStep)
    assert got.samples[0].reward == 0.5
    request = told(Evaluate([ScoringRequest(np.arange(4, dtype=np.int32), 2)]))
    assert isinstance(request, Evaluate)
    assert request.requests[0].num_scored == 2


def test_what_is_no_plain_array_cannot_be_told() -> None:
    with pytest.raises(TypeError, match="one-dimensional arrays"):
        encode(Evaluate([ScoringRequest(np.zeros((2, 2), np.int32), 1)]))
