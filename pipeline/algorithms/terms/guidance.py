"""Token-level guidance as learning rules see it: its columns. Numpy only.

A response is *right* (it has log-probs under the standard prompt only), *wrong* (it also has
log-probs under the judge prompt), or *unguided* (it has neither, which is no error). So the columns
of a response imply its verdict. The losses are in ``guided``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from protocol.trajectory import RewardScore

if TYPE_CHECKING:
    from protocol.trajectory import GuidanceScore


@dataclass(frozen=True, slots=True)
class GuidedColumns:
    """The guidance of the last tokens of a response, as stored in a training sample."""

    standard_logprobs: np.ndarray | None = None
    """float32 [tokens]; None without guidance."""
    judge_logprobs: np.ndarray | None = None
    """float32 [tokens]; only for wrong responses."""

    @property
    def is_absent(self) -> bool:
        return self.standard_logprobs is None

    @property
    def is_judged(self) -> bool:
        """Whether this is a wrong response with a judgment."""
        return self.judge_logprobs is not None


UNGUIDED = GuidedColumns()


def guided_columns(guidance: GuidanceScore, score: RewardScore, num_tokens: int) -> GuidedColumns:
    """Return the guidance of the last ``num_tokens`` of a response, according to its verdict. A
    wrong response that lacks either kind of log-probs is unguided."""
    if not guidance.standard_logprobs.size or not num_tokens:
        return UNGUIDED
    standard = guidance.standard_logprobs[-num_tokens:].astype(np.float32, copy=False)
    if is_right(score):
        return GuidedColumns(standard)
    if not guidance.judge_logprobs.size:
        return UNGUIDED
    return GuidedColumns(standard, guidance.judge_logprobs[-num_tokens:].astype(np.float32, copy=False))


RIGHT_ACCURACY = 0.5
"""Raw accuracy above which a response is right. VAPO does not give its threshold; verifiers here
give 0 or 1."""


def is_right(score: RewardScore) -> bool:
    """Return whether a response is worth imitating: its accuracy before shaping is above 0.5, and
    over-long filtering does not mask it (VAPO, 2504.05118, 4.3.2). T-PPO's port wants a score above
    0."""
    return score.accuracy > RIGHT_ACCURACY and not score.masked
