"""Supervised fine-tuning on all responses (sft), or on the right ones only (rft).

    loss = mean over responses of the mean over their tokens of -log p

Baselines for NLFT, on the same responses through the same code. ``rft`` is rejection fine-tuning:
the verifier selects (2308.01825). ``sft`` ignores verdicts, so wrong responses teach their errors."""

from __future__ import annotations

from typing import ClassVar

from pipeline.algorithms.assemble import AssembledTrajectory
from pipeline.algorithms.guidance import GuidedColumns, is_right
from pipeline.algorithms.response_rule import BY_RESPONSE, ResponseRule
from pipeline.config.catalogue import Declaration
from pipeline.ledger.types import Unit


class Sft(ResponseRule):
    __slots__ = ()
    name: ClassVar[str] = "sft"
    declaration: ClassVar[Declaration] = Declaration(
        Unit.TRAJECTORY, has_group_baseline=False, preset=BY_RESPONSE | {"surrogate": "nll"}
    )

    def verdict(self, member: AssembledTrajectory, guidance: GuidedColumns) -> float:
        del member, guidance
        return 1.0


class Rft(ResponseRule):
    __slots__ = ()
    name: ClassVar[str] = "rft"
    declaration: ClassVar[Declaration] = Sft.declaration

    def verdict(self, member: AssembledTrajectory, guidance: GuidedColumns) -> float:
        del guidance
        return float(is_right(member.score))
