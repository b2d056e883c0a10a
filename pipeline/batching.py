"""From claimed units to what a training step reads: samples, and packing plans without padding.

*Consumes* training samples made by an algorithm. *Produces* micro-batches under a token budget. Pure functions on numpy
arrays; no torch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class TrainingSample:
    """One trajectory (or one window of it) as a training step reads it. R is the number of response tokens in ``tokens``."""

    name: str
    """Trajectory or chunk id, for error messages."""
    tokens: np.ndarray
    """int32 [prompt + response]"""
    prompt_length: int
    """Tokens before the first response token; at least 1."""
    loss_mask: np.ndarray
    """bool [R]: tokens that carry loss."""
    advantages: np.ndarray
    """float32 [R]; only read where the mask is set."""
    behavior_logprobs: np.ndarray
    """float32 [R], when sampled."""
    versions: np.ndarray
    """int32 [R], the policy version that sampled each token."""
    reference_logprobs: np.ndarray | None = None
    """float32 [R]"""
    old_logprobs: np.ndarray | None = None
    """float32 [R], the learner's own at the start of the update; filled in before the first step."""
    reward: float = 0.0
    accuracy: float = 0.0

    @property
    def response_length(self) -> int:
        """R."""
        return int(self.tokens.size - self.prompt_length)
