"""Supervised fine-tuning on all responses (sft), or on the right ones only (rft).

    loss = mean over responses of the mean over their tokens of -log p

Baselines for NLFT, on the same responses through the same code. ``rft`` is rejection fine-tuning:
the verifier selects (2308.01825). ``sft`` ignores verdicts, so wrong responses teach their errors."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pipeline.algorithms.assemble import AssembledTrajectory
from pipeline.algorithms.base import per_token
from pipeline.algorithms.response_rule import ResponseRule
from pipeline.algorithms.terms.guidance import GuidedColumns, is_right
from pipeline.config.catalogue import Declaration
from pipeline.ledger.types import Unit

if TYPE_CHECKING:
    from torch import Tensor

    from pipeline.algorithms.terms.loss_terms import LossTerms


class Sft(ResponseRule):
    __slots__ = ()
    declaration: ClassVar[Declaration] = Declaration(Unit.TRAJECTORY, has_group_baseline=False)

    def verdict(self, member: AssembledTrajectory, guidance: GuidedColumns) -> float:
        del member, guidance
        return 1.0

    @per_token
    def token_loss(self, terms: LossTerms) -> Tensor:
        return -terms.logprobs


class Rft(Sft):
    __slots__ = ()

    def verdict(self, member: AssembledTrajectory, guidance: GuidedColumns) -> float:
        del guidance
        return float(is_right(member.score))
