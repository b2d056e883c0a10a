"""CISPO: clipped importance sampling weights (MiniMax-M1, 2506.13585).

    loss = -sum_{i,t} sg( clip(r_{i,t}, 1 - eps_low, 1 + eps_high) ) A_i logp_{i,t} / sum_i |o_i|

with GRPO's A_i. The weight is clipped, never the token, so rare tokens that PPO's clip would
silence keep their gradient. The paper has no lower bound (``clip_low = 1``) and does not give the
upper one. Meaningless for groups of one response."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pipeline.algorithms.base import per_token
from pipeline.algorithms.dapo import Dapo
from pipeline.algorithms.group_rule import GroupRule
from pipeline.config.catalogue import Declaration
from pipeline.config.learning import StandardisedSettings

if TYPE_CHECKING:
    from pipeline.algorithms.terms.clip import TokenLoss
    from pipeline.algorithms.terms.loss_terms import LossTerms

# the paper leaves the upper bound open; 4 is ours
UPPER_BOUND = {"clip_low": 1.0, "clip_high": 4.0, "dynamic_sampling": False}


class Cispo(GroupRule):
    __slots__ = ()
    declaration: ClassVar[Declaration] = Declaration()

    class Settings(StandardisedSettings, defaults=UPPER_BOUND):
        pass

    settings: Settings
    advantages = Dapo.advantages

    @per_token
    def token_loss(self, terms: LossTerms) -> TokenLoss:
        return terms.clipped_weight(terms.ratio, self.settings)
