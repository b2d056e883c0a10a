"""Base class of rules without a critic: complete groups in, one sample per response out.

Such a rule is one equation, ``advantages``, from the rewards of a batch to the advantages of its
tokens. The objective clips and averages, with the defaults that the rule's declaration sets."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from pipeline.algorithms.assemble import AssembledTrajectory, assemble, has_verdict
from pipeline.algorithms.batching import TrainingSample
from pipeline.algorithms.guidance import UNGUIDED, guided_columns, is_right
from pipeline.algorithms.objective import Objective
from pipeline.config.catalogue import Declaration, check_advantages_are_read
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


@dataclass(frozen=True, slots=True)
class GroupRule(ABC):
    """A learning rule on complete groups. Subclasses define ``advantages``."""

    name: ClassVar[str] = ""
    declaration: ClassVar[Declaration]
    objective: Objective
    fields: frozenset[Field] = frozenset({Field.REWARD})
    group_size: int = 16
    signal_filter: bool = False
    normalize_std: bool = True
    """Whether to divide by the group's std, in rules that leave this open."""
    gamma: float = 1.0
    unit: Unit = Unit.GROUP

    @classmethod
    def from_config(cls, config: RunConfig) -> GroupRule:
        section = config.algorithm
        return cls(
            objective=Objective.from_config(config),
            fields=config.score_fields,
            group_size=section.group_size,
            signal_filter=section.dynamic_sampling,
            normalize_std=section.normalize_std,
            gamma=section.gamma,
        )

    @classmethod
    def check(cls, config: RunConfig) -> None:
        """Raise ValueError for a configuration that this rule cannot train; subclasses may add checks."""
        declared = config.declaration
        if declared.unit is not Unit.GROUP or declared.has_critic:
            raise ValueError(
                f"{config.algorithm.name} declares unit {declared.unit.value} and has_critic {declared.has_critic}, "
                f"but a GroupRule works on whole groups without a critic: correct its declaration, or make it a CriticRule"
            )
        check_advantages_are_read(config.algorithm.name, config.algorithm.surrogate)

    @abstractmethod
    def advantages(self, responses: Responses) -> list[np.ndarray]:
        """Return the advantages of each response's tokens, float64 [tokens]."""

    def prepare(self, units: Sequence[ClaimedUnit]) -> list[TrainingSample]:
        """Make one sample per response that has a verdict.

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
        return [self._sample(*part) for part in parts]

    def _members(self, unit: ClaimedUnit) -> list[AssembledTrajectory]:
        if len(unit.trajectories) != self.group_size:
            raise LedgerError(
                f"group {unit.name} has {len(unit.trajectories)} responses; expected {self.group_size}: a baseline "
                f"over part of a group is biased"
            )
        members = [assemble(unit.name, chunks) for chunks in unit.trajectories if has_verdict(chunks)]
        if len(members) < fewest_judged(self.group_size):
            raise LedgerError(
                f"group {unit.name} has {len(members)} verdicts; expected {fewest_judged(self.group_size)} or more: the "
                "ledger drops a group with fewer; run `headrace ledger audit`"
            )
        for member in members:
            if Field.REFERENCE in self.fields and member.reference_logprobs is None:
                raise LedgerError(
                    f"group {unit.name}: trajectory {member.name} has no reference log-probs; expected them on "
                    f"every chunk, since this run's ledger withholds units until they have them"
                )
        return members

    def _sample(self, member: AssembledTrajectory, mask: np.ndarray, advantages: np.ndarray) -> TrainingSample:
        columns = guided_columns(member.guidance, member.score, mask.size) if member.guidance else UNGUIDED
        imitate = self.objective.imitation_coefficient > 0.0 and is_right(member.score)
        return TrainingSample(
            name=member.name,
            tokens=member.tokens,
            prompt_length=member.prompt_length,
            loss_mask=mask,
            advantages=advantages.astype(np.float32),
            behavior_logprobs=member.behavior_logprobs,
            versions=member.versions,
            reference_logprobs=member.reference_logprobs,
            nll_mask=np.ones(mask.size, dtype=np.bool_) if imitate else None,
            standard_logprobs=columns.standard_logprobs,
            judge_logprobs=columns.judge_logprobs,
            is_unguided=columns.is_absent if Field.GUIDANCE in self.fields else None,
            reward=member.score.reward,
            accuracy=member.score.accuracy,
            reward_parts=member.score.parts,
        )
