"""The responses that a rule also imitates: VAPO's positive examples."""

from __future__ import annotations

from protocol.trajectory import RewardScore

RIGHT_ACCURACY = 0.5
"""Raw accuracy above which a response is right. VAPO does not give its threshold; verifiers here
give 0 or 1."""


def is_right(score: RewardScore) -> bool:
    """Whether a finished response is worth imitating: right before any shaping, and not under
    over-long filtering (VAPO, 2504.05118, 4.3.2). T-PPO's port: the score must be above 0."""
    return score.accuracy > RIGHT_ACCURACY and not score.masked
