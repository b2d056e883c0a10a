"""One batch for each rule with a critic, through ``prepare`` as a run configures it: what ends by
itself, is cut at the cap, is masked as over-long, or goes on. The numbers are worked out here anew,
token by token in plain Python, from the papers' formulas."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, variance

import numpy as np
import pytest

from pipeline.algorithms import build
from pipeline.algorithms.batching import TrainingSample
from pipeline.ledger.types import ClaimedUnit
from protocol.errors import LedgerError
from protocol.trajectory import FinishReason, RewardScore
from tests.pipeline.algorithms.value_units import Response, chunk_units, trajectory_units
from tests.pipeline.op_config import op_config

WINDOW, CAP, TAIL, GAMMA, ALPHA, FLOOR, LAMBDA = 8, 20, 2, 0.9, 0.2, 0.5, 0.8
RIGHT, WRONG = RewardScore(reward=1.0, accuracy=1.0), RewardScore(reward=-1.0, accuracy=0.0)
MASKED = RewardScore(reward=-1.0, accuracy=0.0, masked=True)


def response(member: int, length: int, score: RewardScore, ends_by: FinishReason | None) -> Response:
    dice = np.random.default_rng(member)
    return Response(
        group=0,
        member=member,
        tokens=dice.integers(2, 60, length).astype(np.int32),
        behavior_logprobs=np.full(length, -2.0, np.float32),
        values=dice.choice([-0.75, -0.5, 0.0, 0.25, 1.0], length).astype(np.float32),
        score=score,
        is_finished=ends_by is not None,
        ends_by=ends_by or FinishReason.STOP,
    )


ENDED = [
    response(0, 5, RIGHT, FinishReason.STOP),
    response(1, 11, RIGHT, FinishReason.STOP),
    response(2, CAP, WRONG, FinishReason.LENGTH),
    response(3, CAP, MASKED, FinishReason.LENGTH),
    response(4, 3, WRONG, FinishReason.STOP),
]
UNFINISHED = response(5, 2 * WINDOW, WRONG, None)


@dataclass(frozen=True)
class Stretch:
    """What one sample is of."""

    values: list[float]
    num_earlier: int
    reward: float | None
    """None: the response goes on."""
    is_masked: bool
    is_right: bool

    @property
    def is_trained(self) -> list[bool]:
        size = len(self.values)
        if self.is_masked:
            return [False] * size
        return [self.reward is not None or place < size - TAIL for place in range(size)]


def stretches(responses: list[Response], window: int) -> list[Stretch]:
    found: list[Stretch] = []
    for one in responses:
        for start in range(0, one.tokens.size, window):
            values = [float(value) for value in one.values[start : start + window]]
            is_last = one.is_finished and start + window >= one.tokens.size
            reward = one.score.reward if is_last else None
            is_right = is_last and one.score.accuracy == 1.0
            found.append(Stretch(values, start, reward, is_last and one.score.masked, is_right))
    return found


def lambda_of(rule: str, stretch: Stretch) -> float:
    if rule == "ppo":
        return LAMBDA
    length = stretch.num_earlier + len(stretch.values) + (WINDOW // 2 if stretch.reward is None else 0)
    return max(1.0 - 1.0 / (ALPHA * length), FLOOR if rule == "tppo" else 0.0)


def raw(rule: str, stretch: Stretch) -> list[float]:
    """A_t = sum_j (gamma lambda)^(j-t) delta_j; V after the end is 0, after a window the last one's."""
    values, decay = stretch.values, GAMMA * lambda_of(rule, stretch)
    after = [*values[1:], 0.0 if stretch.reward is not None else values[-1]]
    deltas = [GAMMA * following - value for value, following in zip(values, after, strict=True)]
    deltas[-1] += stretch.reward or 0.0
    return [
        sum(decay ** (later - place) * deltas[later] for later in range(place, len(deltas)))
        for place in range(len(deltas))
    ]


def expected(rule: str, parts: list[Stretch], *, whiten: bool, clamp: float) -> list[list[float]]:
    rows = [raw(rule, part) for part in parts]
    trained = [
        a for row, part in zip(rows, parts, strict=True) for a, is_in in zip(row, part.is_trained, strict=True) if is_in
    ]
    mean, scale = (fmean(trained), (variance(trained) + 1e-8) ** 0.5) if whiten else (0.0, 1.0)
    return [
        [
            min(max((a - mean) / scale, -clamp), clamp) if is_in else 0.0
            for a, is_in in zip(row, part.is_trained, strict=True)
        ]
        for row, part in zip(rows, parts, strict=True)
    ]


def prepared(folder: Path, rule: str, units: list[ClaimedUnit], *, whiten: bool, clamp: float) -> list[TrainingSample]:
    settings = {
        "algorithm.name": rule,
        "algorithm.gamma": GAMMA,
        "algorithm.whiten": str(whiten).lower(),
        "algorithm.advantage_clamp": clamp,
        "generation.window_tokens": WINDOW,
        "generation.max_response_tokens": CAP,
        "reward.overlong": "filter",
    }
    settings |= {"algorithm.gae_lambda": LAMBDA} if rule == "ppo" else {"algorithm.adaptive_lambda_alpha": ALPHA}
    if rule == "tppo":
        settings |= {"algorithm.adaptive_lambda_floor": FLOOR, "algorithm.tail_drop_tokens": TAIL}
    config = op_config(folder, *(f"{key}={value}" for key, value in settings.items()))
    return list(build(config).prepare(units))


@pytest.mark.parametrize(("whiten", "clamp"), [(True, 1.25), (False, 0.6)], ids=["whitened", "raw"])
@pytest.mark.parametrize("rule", ["ppo", "vapo", "tppo"])
def test_a_batch_of_every_ending_has_the_papers_numbers(tmp_path: Path, rule: str, whiten: bool, clamp: float) -> None:
    given = [*ENDED, UNFINISHED] if rule == "tppo" else ENDED
    units = chunk_units(given, WINDOW) if rule == "tppo" else trajectory_units(given, WINDOW)
    parts = stretches(given, WINDOW if rule == "tppo" else CAP)
    wanted = expected(rule, parts, whiten=whiten, clamp=clamp)
    assert clamp in {abs(a) for row in wanted for a in row}, "the clamp is seen"
    samples = prepared(tmp_path, rule, units, whiten=whiten, clamp=clamp)
    assert len(samples) == len(parts)
    counted = sum(len(part.values) for part in parts if not part.is_masked) / len(parts)
    for sample, part, advantages in zip(samples, parts, wanted, strict=True):
        imitates = rule != "ppo" and part.is_right
        before = part.num_earlier if imitates else 0
        np.testing.assert_allclose(sample.advantages, [0.0] * before + advantages, rtol=2e-6, atol=2e-7)
        assert sample.loss_mask.tolist() == [False] * before + part.is_trained
        assert (sample.nll_mask is not None and sample.nll_mask.all()) == imitates
        assert sample.is_finished == (part.reward is not None)
        assert sample.counted_tokens == pytest.approx(counted)


@pytest.mark.parametrize("rule", ["ppo", "vapo"])
def test_an_unfinished_response_is_refused_by_rules_on_whole_ones(tmp_path: Path, rule: str) -> None:
    with pytest.raises(LedgerError, match="unfinished trajectory cannot be trained on as a whole"):
        prepared(tmp_path, rule, trajectory_units([UNFINISHED], WINDOW), whiten=True, clamp=1.0)
