"""RLOO: REINFORCE with a leave-one-out baseline (2402.14740).

    A_i = R_i - mean_{j != i} R_j = G / (G - 1) (R_i - mean_j R_j),    loss: mean over i of sum over t

Unbiased, since a response is not part of its own baseline. The paper takes one on-policy step with
``-A log pi``; our clipped ratio has the same gradient in that step and stays bounded in later ones.
Meaningless for groups of one response."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from pipeline.algorithms.dapo import Dapo
from pipeline.algorithms.group_rule import GroupRule, Responses
from pipeline.algorithms.terms.advantage import leave_one_out_advantages
from pipeline.config.catalogue import Declaration
from pipeline.config.learning import SYMMETRIC, DualClipSettings


class Rloo(GroupRule):
    __slots__ = ()
    declaration: ClassVar[Declaration] = Declaration()

    class Settings(DualClipSettings, defaults=SYMMETRIC | {"loss_aggregation": "seq-mean-token-sum"}):
        pass

    settings: Settings
    token_loss = Dapo.token_loss

    def advantages(self, responses: Responses) -> list[np.ndarray]:
        return responses.spread(leave_one_out_advantages(responses.rewards, responses.groups))
