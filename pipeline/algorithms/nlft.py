"""NLFT: natural language fine-tuning (2412.20382), and its first-error variant.

    nlft          right: 10 (w + 1) (-log p_b),   w from p_s
                  wrong: 10 v (-log(1 - p_b)) where p_j > 1.5 p_b, p_j > 1.5 p_s and p_j > 0.01; else 10 p_s^0.5 (-log p_b)
    nlft-first    right: the same.   wrong: up to the first token with p_j > 1.5 p_s and p_j > 0.01, and not after it
    both          mean over responses of the mean over their tokens

The current policy gives a token the probability p_b; the frozen reference policy gives it p_s after
the gold text and p_j after the judgment. ``guided_loss`` has the weights. A right response without
guidance is imitated plainly. A wrong one without a judgment trains nothing, and is counted.

Tens of responses are enough, and any policy may have sampled them. The published form cannot flag a
confident error, because its ratio p_j / p_b is at most 1 / p_b. The first-error variant is ours; it
flags nothing, and so is meaningless, if judgments do not quote the wrong step.

Certain, from the public code: weights, flags, constants, division by each response's length.
Inferred: that in the first-error variant a response without a flag teaches nothing. Not copied: a
loss on wrong responses that pairs the judge prompt's probabilities with tokens at other positions."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pipeline.algorithms.assemble import AssembledTrajectory
from pipeline.algorithms.response_rule import ResponseRule
from pipeline.algorithms.terms.guidance import GuidedColumns, is_right
from pipeline.config.catalogue import Declaration
from pipeline.ledger.types import Unit

if TYPE_CHECKING:
    from pipeline.algorithms.terms.clip import TokenLoss
    from pipeline.algorithms.terms.loss_terms import LossTerms


class Nlft(ResponseRule):
    __slots__ = ()
    declaration: ClassVar[Declaration] = Declaration(Unit.TRAJECTORY, has_group_baseline=False, needs_guidance=True)

    def verdict(self, member: AssembledTrajectory, guidance: GuidedColumns) -> float:
        """Return 1 for a right response, -1 for a wrong one with a judgment, else 0."""
        if is_right(member.score):
            return 1.0
        return -1.0 if guidance.is_judged else 0.0

    def token_loss(self, terms: LossTerms) -> TokenLoss:
        return terms.published_loss(self.guidance)


class NlftFirst(Nlft):
    __slots__ = ()

    def token_loss(self, terms: LossTerms) -> TokenLoss:
        return terms.first_error_loss(self.guidance)
