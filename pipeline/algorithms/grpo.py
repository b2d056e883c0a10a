"""GRPO (2402.03300), and Dr.GRPO (2503.20783), which removes two of its biases.

    GRPO       A_i = (R_i - mean_j R_j) / (std_j R_j + 1e-6), every response weighs the same: mean over i of mean over t
    Dr.GRPO    A_i =  R_i - mean_j R_j,          every token weighs the same: mean over i of sum over t, by a constant L_max

GRPO's mean over a response's tokens makes long wrong responses cheap, and its std gives too much
weight to groups that are nearly all right or all wrong. Dr.GRPO drops both. DAPO is GRPO with a
token mean, a higher upper bound and the group filter. GRPO's paper adds 0.04 times the k3 estimate
of KL(policy || reference): set ``kl_coefficient``. Meaningless for groups of one response."""

from __future__ import annotations

from pipeline.algorithms.dapo import Dapo
from pipeline.config.learning import SYMMETRIC


class Grpo(Dapo):
    __slots__ = ()

    class Settings(Dapo.Settings, defaults=SYMMETRIC | {"loss_aggregation": "seq-mean-token-mean"}):
        pass


class DrGrpo(Dapo):
    __slots__ = ()

    class Settings(
        Dapo.Settings, defaults=SYMMETRIC | {"loss_aggregation": "seq-mean-token-sum-norm", "normalize_std": False}
    ):
        pass
