"""Verifiers for data without answers."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.config.training import RewardSection
from pipeline.rewards.by_model import above_zero, sigmoid
from pipeline.rewards.pool import VerifierPool
from pipeline.rewards.verifier import Response, Verdict, VerifierFailure, VerifierFailureKind, checked


def response(score: float | None, verifier: str = "reward_model") -> Response:
    return Response(response_text="x", answer="", verifier=verifier, model_score=score)


def test_what_scores_above_the_centre_is_right() -> None:
    scores = [-2.0, 0.0, 1e-9, 3.0]
    assert above_zero([response(score) for score in scores]) == [Verdict(accuracy=a) for a in (0.0, 0.0, 1.0, 1.0)]


@given(st.floats(-30.0, 30.0))
def test_the_sigmoid_is_the_chance_to_win_against_the_centre(score: float) -> None:
    (verdict,) = sigmoid([response(score)])
    assert isinstance(verdict, Verdict)
    assert verdict.accuracy == pytest.approx(1.0 / (1.0 + math.exp(-score)), abs=1e-12)


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_every_finite_score_makes_a_valid_verdict(score: float) -> None:
    for judge in (above_zero, sigmoid):
        assert all(isinstance(outcome, Verdict) for outcome in checked(judge([response(score)]), 1))


async def test_without_a_reward_model_a_response_is_not_judged_and_not_wrong() -> None:
    async with VerifierPool(RewardSection()) as pool:
        outcomes = await pool.score([response(None), response(1.0, "reward_model_sigmoid"), response(-1.0)])
    failure, chance, wrong = outcomes
    assert isinstance(failure, VerifierFailure)
    assert failure.kind is VerifierFailureKind.BAD_ANSWER
    assert "set reward.model.path" in failure.error
    assert isinstance(chance, Verdict)
    assert wrong == Verdict(accuracy=0.0)
