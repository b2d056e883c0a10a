"""Guidance of single tokens as learning rules read it: its constants, and its columns. Numpy only.

A response has one of three kinds. *Right*: log-probs under the standard prompt alone. *Wrong*:
those, and log-probs under the judge prompt. *Unguided*: none, which is a state and no error. So the
columns of a response imply its verdict. The losses are in ``guided_loss``."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class GuidanceSettings:
    """Constants of the guided losses; defaults as published (NLFT, 2412.20382, and its code)."""

    standard_threshold: float = 0.95
    """tau: a token of more standard probability has a weight above 1."""
    standard_power: float = 0.6
    cluster_power: float = 0.3
    """In place of ``standard_power`` inside of a cluster."""
    bonus_power: float = 5.0
    judge_ratio: float = 1.5
    """A token is flagged where its judge probability is above this multiple of the others."""
    min_judge_probability: float = 0.01
    max_flagged_share: float = 0.06
    """Where more of a wrong response is flagged, its other tokens have no loss."""
    unflagged_power: float = 0.5
    loss_scale: float = 10.0
    nll_coefficient: float = 1.0
    """Of the plain imitation loss of right responses, beside the weighted one."""


PUBLISHED = GuidanceSettings()
