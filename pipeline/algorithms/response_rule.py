"""Base class of rules that learn from single responses by their verdict: supervised, or with
guidance.

Such a rule has no advantage. From a response's score and guidance it decides 1 (imitate), -1 (learn
from what is wrong) or 0 (train nothing), and the surrogate does the rest. Since no token is
compared with the policy that sampled it, responses may come from anywhere. All log-probs are at
temperature 1: imitation is of the model itself, and guidance thresholds are probabilities of the
model itself."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Final

import numpy as np

from pipeline.algorithms.assemble import AssembledTrajectory, assemble, has_verdict
from pipeline.algorithms.batching import TrainingSample
from pipeline.algorithms.guidance import UNGUIDED, GuidedColumns, guided_columns, is_right
from pipeline.algorithms.objective import Objective
from pipeline.config.catalogue import GUIDED_SURROGATES, SURROGATES, VERDICT_SURROGATES, Declaration
from pipeline.ledger.types import ClaimedUnit, Unit
from protocol.errors import LedgerError
from protocol.trajectory import Field

if TYPE_CHECKING:
    from pipeline.config.schema import RunConfig

BY_RESPONSE: Final = {
    "group_size": 1,
    "dynamic_sampling": False,
    "dual_clip": 0.0,
    "importance": "none",
    "loss_aggregation": "seq-mean-token-mean",
}
"""The preset of all these rules: single responses of equal weight."""


@dataclass(frozen=True, slots=True)
class ResponseRule(ABC):
    """A learning rule on single responses. Subclasses define ``verdict``."""

    name: ClassVar[str] = ""
    declaration: ClassVar[Declaration]
    is_imitation: ClassVar[bool] = True
    """Train at temperature 1, whatever the sampling temperature (``RunConfig.training_temperature``)."""
    objective: Objective
    fields: frozenset[Field] = frozenset({Field.REWARD})
    signal_filter: bool = False
    unit: Unit = Unit.TRAJECTORY

    @classmethod
    def from_config(cls, config: RunConfig) -> ResponseRule:
        return cls(objective=Objective.from_config(config), fields=config.score_fields)

    @classmethod
    def check(cls, config: RunConfig) -> None:
        """Raise ValueError for a configuration that this rule cannot train; subclasses may add checks."""
        declared, algorithm = config.declaration, config.algorithm
        if declared.unit is not Unit.TRAJECTORY or declared.has_critic:
            raise ValueError(
                f"{algorithm.name} declares unit {declared.unit.value} and has_critic {declared.has_critic}, but a "
                f"ResponseRule works on single responses without a critic: correct its declaration"
            )
        for name, neutral in (("importance", "none"), ("rejection", "none"), ("guidance", "none")):
            if getattr(algorithm, name) != neutral:
                raise ValueError(
                    f"algorithm.{name} is {getattr(algorithm, name)}, but {algorithm.name} uses neither advantages nor the "
                    f"sampling policy's log-probs; leave {name} at {neutral}, or choose another algorithm"
                )

        usable = [name for name in VERDICT_SURROGATES if declared.needs_guidance or name not in GUIDED_SURROGATES]
        if algorithm.surrogate in SURROGATES and algorithm.surrogate not in usable:
            raise ValueError(
                f"algorithm.surrogate is {algorithm.surrogate}, but {algorithm.name} has only verdicts"
                f"{'' if declared.needs_guidance else ' and no guidance'}; set it to {' or '.join(usable)}, or leave it out"
            )

    @abstractmethod
    def verdict(self, member: AssembledTrajectory, guidance: GuidedColumns) -> float:
        """Return 1, -1 or 0 for a response."""

    def prepare(self, units: Sequence[ClaimedUnit]) -> list[TrainingSample]:
        """Make one sample per response, with its verdict in place of an advantage.

        A response that trains nothing has an empty mask and counts in no denominator; one that
        never got a verdict has no sample. Raises NonFiniteUnit and LedgerError."""
        return [
            self._sample(assemble(unit.name, chunks))
            for unit in units
            for chunks in unit.trajectories
            if has_verdict(chunks)
        ]

    def _sample(self, member: AssembledTrajectory) -> TrainingSample:
        if Field.REFERENCE in self.fields and member.reference_logprobs is None:
            raise LedgerError(f"trajectory {member.name} lacks reference log-probs; expected them on every chunk")
        num_tokens = member.versions.size
        columns = guided_columns(member.guidance, member.score, num_tokens) if member.guidance else UNGUIDED
        verdict = 0.0 if member.score.masked else self.verdict(member, columns)
        imitate = self.objective.imitation_coefficient > 0.0 and is_right(member.score)
        return TrainingSample(
            name=member.name,
            tokens=member.tokens,
            prompt_length=member.prompt_length,
            loss_mask=np.full(num_tokens, verdict != 0.0),
            advantages=np.full(num_tokens, verdict, dtype=np.float32),
            behavior_logprobs=member.behavior_logprobs,
            versions=member.versions,
            reference_logprobs=member.reference_logprobs,
            nll_mask=np.ones(num_tokens, dtype=np.bool_) if imitate else None,
            standard_logprobs=columns.standard_logprobs,
            judge_logprobs=columns.judge_logprobs,
            is_unguided=columns.is_absent if Field.GUIDANCE in self.fields else None,
            reward=member.score.reward,
            accuracy=member.score.accuracy,
            reward_parts=member.score.parts,
        )
