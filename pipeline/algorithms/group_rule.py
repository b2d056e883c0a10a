"""Base class of rules without a critic: complete groups in, one sample per response out.

Such a rule is two equations: ``advantages``, from the rewards of a batch to the advantages of its
tokens, and ``token_loss``."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pipeline.algorithms.assemble import AssembledTrajectory, assemble, has_verdict
from pipeline.algorithms.base import Rule
from pipeline.algorithms.batching import TrainingSample
from pipeline.ledger.types import ClaimedUnit, Unit
from pipeline.ledger.validation import fewest_judged
from protocol.errors import LedgerError
from protocol.trajectory import Field

if TYPE_CHECKING:
    from pipeline.config.schema import RunConfig


@dataclass(frozen=True, slots=True)
class Responses:
    """All responses of an update: the inputs of an advantage."""

    rewards: np.ndarray
    """float64 [responses]"""
    groups: np.ndarray
    """int64 [responses]: the group of each response."""
    masks: tuple[np.ndarray, ...]
    """bool [tokens] each: the loss tokens. All False for an over-long response under filtering."""

    def spread(self, advantages: np.ndarray) -> list[np.ndarray]:
        """Give every token of response i ``advantages[i]``."""
        return [np.full(mask.size, value) for mask, value in zip(self.masks, advantages, strict=True)]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRule(Rule):
    """A learning rule on complete groups. Subclasses define ``advantages`` and ``token_loss``."""

    @classmethod
    def check(cls, config: RunConfig) -> None:
        """Raise ValueError for a configuration that this rule cannot train; subclasses may add checks."""
        declared = config.declaration
        if declared.unit is not Unit.GROUP or declared.has_critic:
            raise ValueError(
                f"{config.algorithm.name} declares unit {declared.unit.value} and has_critic {declared.has_critic}, "
                f"but a GroupRule works on whole groups without a critic: correct its declaration, or make it a CriticRule"
            )

    @abstractmethod
    def advantages(self, responses: Responses) -> list[np.ndarray]:
        """Return the advantages of each response's tokens, float64 [tokens]."""

    def prepare(self, units: Sequence[ClaimedUnit]) -> list[TrainingSample]:
        """Make the samples of each response that has a verdict.

        Over-long responses under filtering carry no loss but still count in their group; responses
        without a verdict are left out. Raises NonFiniteUnit; raises LedgerError for an incomplete
        group."""
        groups = [self._members(unit) for unit in units]
        members = [member for group in groups for member in group]
        responses = Responses(
            rewards=np.array([member.score.reward for member in members], dtype=np.float64),
            groups=np.repeat(np.arange(len(groups)), [len(group) for group in groups]),
            masks=tuple(np.full(member.versions.size, not member.score.masked) for member in members),
        )
        parts = zip(members, responses.masks, self.advantages(responses), strict=True)
        return [sample for part in parts for sample in self.response_samples(*part)]

    def _members(self, unit: ClaimedUnit) -> list[AssembledTrajectory]:
        if len(unit.trajectories) != self.settings.group_size:
            raise LedgerError(
                f"group {unit.name} has {len(unit.trajectories)} responses; expected {self.settings.group_size}: a baseline "
                f"over part of a group is biased"
            )
        members = [assemble(unit.name, chunks) for chunks in unit.trajectories if has_verdict(chunks)]
        if len(members) < fewest_judged(self.settings.group_size):
            raise LedgerError(
                f"group {unit.name} has {len(members)} verdicts; expected {fewest_judged(self.settings.group_size)} or more: "
                "the ledger drops a group with fewer; run `headrace ledger audit`"
            )
        for member in members:
            if Field.REFERENCE in self.fields and member.reference_logprobs is None:
                raise LedgerError(
                    f"group {unit.name}: trajectory {member.name} has no reference log-probs; expected them on "
                    f"every chunk, since this run's ledger withholds units until they have them"
                )
        return members
