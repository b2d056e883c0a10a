"""Verifiers for data without answers, by the reward model's centred score.

A reward model trained on comparisons (Bradley-Terry) measures how much better one response is than
another; ``reward.model.center`` is the zero of its scale. ``above_zero`` takes responses above the
zero for right and the rest for wrong, so that dynamic sampling drops groups that are all on one
side. ``sigmoid`` returns the chance that the response would win against one that scores ``center``.
Such accuracies are never quite alike, so no group is dropped."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from pipeline.rewards.verifier import Response, Verdict, VerifierFailure, VerifierFailureKind, VerifierOutcome


def above_zero(responses: Sequence[Response], /) -> list[VerifierOutcome]:
    """Call a response right when its score is above the centre."""
    return _by_score(responses, lambda score: float(score > 0.0))


def sigmoid(responses: Sequence[Response], /) -> list[VerifierOutcome]:
    """Take the logistic function of the centred score for accuracy."""
    return _by_score(responses, lambda score: 0.5 * (1.0 + math.tanh(0.5 * score)))


def _by_score(responses: Sequence[Response], accuracy: Callable[[float], float]) -> list[VerifierOutcome]:
    scores = [response.model_score for response in responses]
    return [_NO_MODEL if score is None else Verdict(accuracy=accuracy(score)) for score in scores]


_NO_MODEL = VerifierFailure(
    kind=VerifierFailureKind.BAD_ANSWER,
    error="this verifier goes by a reward model, and none has read the response; set reward.model.path in the run's "
    "configuration (`headrace score` reads none)",
)
