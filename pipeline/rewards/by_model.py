"""Verifiers for data without answers: what the reward model thinks is what counts as right.

*Consumes* the centred score that the reward worker puts into each response. *Produces* accuracies.
*Waits for* nothing.

A reward model trained on comparisons (Bradley-Terry) says how much better one response is than
another; the zero of its scale is where ``reward.model.center`` puts it. ``above_zero`` calls what
is better right and the rest wrong, so that dynamic sampling drops groups that are all on one side.
``sigmoid`` gives the chance that the response would win against one that scores ``center``; such
accuracies are never quite alike, so no group is dropped.
"""

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
    return [
        _NO_MODEL if response.model_score is None else Verdict(accuracy=accuracy(response.model_score))
        for response in responses
    ]


_NO_MODEL = VerifierFailure(
    kind=VerifierFailureKind.BAD_ANSWER,
    error="this verifier goes by a reward model, and none has read the response; set reward.model.path in the run's "
    "configuration (`headrace score` reads none)",
)
