"""Emulated scoring: log-probs that are a function of the tokens alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ops.emulated.pace import Pace
from workers.engines.model.rng import uniforms
from workers.engines.scoring.seam import ScoringRequest


class EmulatedScoring:
    """A :class:`workers.engines.scoring.seam.ScoringEngine`."""

    def __init__(self, *, token_s: float = 0.0) -> None:
        """``token_s``: seconds of work for each token, including context."""
        self._token_s = token_s
        self._pace = Pace()

    def logprobs(self, requests: Sequence[ScoringRequest]) -> list[np.ndarray]:
        self._pace.spend(self._token_s * sum(request.tokens.size for request in requests))
        return [np.log(tail_uniforms(request)).astype(np.float32) for request in requests]


def tail_uniforms(request: ScoringRequest) -> np.ndarray:
    """Return float64 [num_scored] in (0, 1), a function of each scored token and its position."""
    size = request.tokens.size
    return uniforms(
        request.tokens[size - request.num_scored :].astype(np.uint64), np.arange(size - request.num_scored, size)
    )
