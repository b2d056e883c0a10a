"""Verifiers for data without answers, based on the reward model's centred score.

A reward model trained on comparisons (Bradley-Terry) measures how much better one response is than
another; ``reward.model.center`` is the zero of its scale. ``above_zero`` calls responses above zero
right and the others wrong, so that dynamic sampling drops groups that are all on one side.
``sigmoid`` returns the probability that the response would win against one with score ``center``;
such accuracies are almost never equal, so no group is dropped."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from pipeline.rewards.verifier import Response, Verdict, VerifierFailure, VerifierFailureKind, VerifierOutcome


def above_zero(responses: Sequence[Response], /) -> list[VerifierOutcome]:
    return _by_score(responses, lambda score: float(score > 0.0))


def sigmoid(responses: Sequence[Response], /) -> list[VerifierOutcome]:
    return _by_score(responses, lambda score: 0.5 * (1.0 + math.tanh(0.5 * score)))


def _by_score(responses: Sequence[Response], accuracy: Callable[[float], float]) -> list[VerifierOutcome]:
    scores = [response.model_score for response in responses]
    return [_NO_MODEL if score is None else Verdict(accuracy=accuracy(score)) for score in scores]


_NO_MODEL = VerifierFailure(
    kind=VerifierFailureKind.BAD_ANSWER,
    error="this verifier needs a reward model's score, but the response has none; set reward.model.path in the run's "
    "configuration (`headrace score` runs no reward model)",
)
