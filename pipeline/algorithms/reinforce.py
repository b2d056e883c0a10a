"""REINFORCE++ and REINFORCE++ with baseline (2501.03262): whitened over the whole batch, not within
groups.

    REINFORCE++            A_{i,t} = whiten( sum_{s >= t} gamma^(s - t) r_{i,s} ),   r 0 but at the last token
    with baseline          A_{i,t} = whiten( R_i - mean_j R_j )

Whitening over all tokens of the batch gives moments with little noise, and a one-sided group does
not dominate. The paper subtracts a KL penalty from token rewards; here KL is a term of the loss
(``kl_coefficient``). REINFORCE++ itself needs no group: one response per prompt is enough. With the
baseline, groups of one response are meaningless."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from pipeline.algorithms.dapo import Dapo
from pipeline.algorithms.group_rule import GroupRule, Responses
from pipeline.algorithms.terms.advantage import discounted_sums, group_advantages, terminal_rewards, whiten_rows
from pipeline.config.catalogue import Declaration
from pipeline.config.learning import SYMMETRIC, DiscountedSettings, DualClipSettings


class ReinforcePlusPlus(GroupRule):
    __slots__ = ()
    declaration: ClassVar[Declaration] = Declaration(has_group_baseline=False)

    class Settings(DiscountedSettings, defaults=SYMMETRIC):
        pass

    settings: Settings
    token_loss = Dapo.token_loss

    def advantages(self, responses: Responses) -> list[np.ndarray]:
        returns = [
            discounted_sums(terminal_rewards(float(reward), mask.size), self.settings.gamma)
            for reward, mask in zip(responses.rewards, responses.masks, strict=True)
        ]
        return whiten_rows(returns, responses.masks)


class ReinforcePlusPlusBaseline(GroupRule):
    __slots__ = ()
    declaration: ClassVar[Declaration] = Declaration()

    class Settings(DualClipSettings, defaults=SYMMETRIC):
        pass

    settings: Settings
    token_loss = Dapo.token_loss

    def advantages(self, responses: Responses) -> list[np.ndarray]:
        centred = group_advantages(responses.rewards, responses.groups, normalize_std=False)
        return whiten_rows(responses.spread(centred), responses.masks)
