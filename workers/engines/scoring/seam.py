"""The interface between the reference worker and the engines that compute log-probs of given
tokens.

An engine blocks; it is called from the worker's one compute thread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from protocol.errors import EngineError


@dataclass(frozen=True, slots=True)
class ScoringRequest:
    tokens: np.ndarray
    """int32 [context and tail]"""
    num_scored: int
    """Length of the tail; at least one token precedes it."""


class ScoringEngine(Protocol):
    def logprobs(self, requests: Sequence[ScoringRequest]) -> list[np.ndarray]:
        """Return float32 [num_scored] for each request, at the sampling temperature."""
        ...


def check_requests(requests: Sequence[ScoringRequest], vocabulary: int) -> None:
    """Raise EngineError if nothing precedes the scored tokens, or a token is unknown (fatal on a
    GPU)."""
    for request in requests:
        tokens = request.tokens
        if not 0 <= request.num_scored < tokens.size:
            raise EngineError(
                f"a sequence has {tokens.size} tokens of which {request.num_scored} are to be scored; at least one token must "
                "precede them: start prompts with a token"
            )
        if tokens.min() < 0 or tokens.max() >= vocabulary:
            raise EngineError(
                f"a sequence has tokens {tokens.min()} to {tokens.max()}, but this model knows 0 to {vocabulary - 1}; give a "
                "reference model with the policy's vocabulary"
            )
