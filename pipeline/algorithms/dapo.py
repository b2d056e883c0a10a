"""DAPO: decoupled clip and dynamic sampling policy optimisation (2503.14476).

    A_i = (R_i - mean_j R_j) / (std_j R_j + 1e-6)                             for every token of response i
    loss = sum_{i,t} max(-A_i r_{i,t}, -A_i clip(r_{i,t}, 1 - eps_low, 1 + eps_high)) / sum_i |o_i|
    over groups with 0 < #{right} < G

Groups that are all right or all wrong teach nothing, and the ledger drops them by their raw
accuracy. Two defaults are not in the paper and can be switched off: the dual clip of the authors'
recipe, and a truncated importance weight for sampling ahead of learning. Meaningless for groups of
one response."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import numpy as np

from pipeline.algorithms.base import per_token
from pipeline.algorithms.group_rule import GroupRule, Responses
from pipeline.algorithms.terms.advantage import group_advantages
from pipeline.config.catalogue import Declaration
from pipeline.config.learning import DualClipSettings, StandardisedSettings

if TYPE_CHECKING:
    from pipeline.algorithms.terms.clip import TokenLoss
    from pipeline.algorithms.terms.loss_terms import LossTerms


class Dapo(GroupRule):
    __slots__ = ()
    declaration: ClassVar[Declaration] = Declaration()

    class Settings(StandardisedSettings, DualClipSettings):
        pass

    settings: Settings

    def advantages(self, responses: Responses) -> list[np.ndarray]:
        normalize = self.settings.normalize_std
        return responses.spread(group_advantages(responses.rewards, responses.groups, normalize_std=normalize))

    @per_token
    def token_loss(self, terms: LossTerms) -> TokenLoss:
        return terms.clip(terms.ratio, self.settings, dual_clip=self.settings.dual_clip)
