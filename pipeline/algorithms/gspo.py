"""GSPO: group sequence policy optimisation (2507.18071).

    s_i = exp( mean_t (logp_{i,t} - old_{i,t}) )
    loss = mean over i of max(-A_i s_i, -A_i clip(s_i, 1 - eps_low, 1 + eps_high))

with GRPO's A_i. A response is clipped as a whole, so the bounds are narrow (3e-4 and 4e-4). Each of
its sequences has an s_i of its own, if an environment replaced the context. Meaningless for groups of
one response, and for windows of an unfinished response, where the ratio would cover only a part."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pipeline.algorithms.dapo import Dapo
from pipeline.algorithms.group_rule import GroupRule
from pipeline.config.catalogue import Declaration
from pipeline.config.learning import StandardisedSettings

if TYPE_CHECKING:
    from pipeline.algorithms.terms.clip import TokenLoss
    from pipeline.algorithms.terms.loss_terms import LossTerms

NARROW = {"clip_low": 3e-4, "clip_high": 4e-4, "loss_aggregation": "seq-mean-token-mean", "dynamic_sampling": False}


class Gspo(GroupRule):
    __slots__ = ()
    declaration: ClassVar[Declaration] = Declaration()

    class Settings(StandardisedSettings, defaults=NARROW):
        pass

    settings: Settings
    advantages = Dapo.advantages

    def token_loss(self, terms: LossTerms) -> TokenLoss:
        return terms.clip(terms.sequence_ratio(), self.settings)
