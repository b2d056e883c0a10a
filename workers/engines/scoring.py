"""The seam between the reference worker and whatever computes log-probs of given tokens.

*Consumes* token sequences. *Produces* log-probs of their tails. Blocking; driven from the worker's one compute thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np


@dataclass(frozen=True, slots=True)
class ScoringRequest:
    """Score the tail of one sequence."""

    tokens: np.ndarray
    """int32 [context and tail]"""
    num_scored: int
    """Length of the tail; at least one token precedes it."""


class ScoringEngine(Protocol):
    """A frozen model."""

    def logprobs(self, requests: Sequence[ScoringRequest]) -> list[np.ndarray]:
        """Return, for each request, float32 [num_scored] log-probs of the tail at the sampling temperature."""
        ...
