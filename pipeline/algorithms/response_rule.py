"""Base class of rules that learn from single responses by their verdict: supervised, or with
guidance.

Such a rule has no advantage. From a response's score and guidance it decides 1 (imitate), -1 (learn
from what is wrong) or 0 (train nothing), and ``token_loss`` does the rest. Since no token is
compared with the policy that sampled it, responses may come from anywhere. All log-probs are at
temperature 1: imitation is of the model itself, and guidance thresholds are probabilities of the
model itself."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Final

import numpy as np

from pipeline.algorithms.assemble import AssembledTrajectory, assemble, has_verdict
from pipeline.algorithms.base import Rule
from pipeline.algorithms.batching import TrainingSample
from pipeline.algorithms.terms.guidance import GuidedColumns
from pipeline.config.learning import AlgorithmSection
from pipeline.ledger.types import ClaimedUnit, Unit
from protocol.errors import LedgerError
from protocol.trajectory import Field

if TYPE_CHECKING:
    from pipeline.config.schema import RunConfig

BY_RESPONSE: Final = {"group_size": 1, "dynamic_sampling": False, "loss_aggregation": "seq-mean-token-mean"}
"""Defaults of all these rules: single responses of equal weight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseRule(Rule):
    """A learning rule on single responses. Subclasses define ``verdict`` and ``token_loss``."""

    is_imitation: ClassVar[bool] = True
    """Train at temperature 1, whatever the sampling temperature (``RunConfig.training_temperature``)."""

    class Settings(AlgorithmSection, defaults=BY_RESPONSE):
        pass

    @classmethod
    def check(cls, config: RunConfig) -> None:
        """Raise ValueError for a configuration that this rule cannot train; subclasses may add checks."""
        declared, algorithm = config.declaration, config.algorithm
        if declared.unit is not Unit.TRAJECTORY or declared.has_critic:
            raise ValueError(
                f"{algorithm.name} declares unit {declared.unit.value} and has_critic {declared.has_critic}, but a "
                f"ResponseRule works on single responses without a critic: correct its declaration"
            )

    @abstractmethod
    def verdict(self, member: AssembledTrajectory, guidance: GuidedColumns) -> float:
        """Return 1, -1 or 0 for a response."""

    def prepare(self, units: Sequence[ClaimedUnit]) -> list[TrainingSample]:
        """Make the samples of each response, with its verdict in place of an advantage.

        A response that trains nothing has an empty mask and counts in no denominator; one that
        never got a verdict has no sample. Raises NonFiniteUnit and LedgerError."""
        return [
            sample
            for unit in units
            for chunks in unit.trajectories
            if has_verdict(chunks)
            for sample in self._samples(assemble(unit.name, chunks))
        ]

    def _samples(self, member: AssembledTrajectory) -> list[TrainingSample]:
        if Field.REFERENCE in self.fields and member.reference_logprobs is None:
            raise LedgerError(f"trajectory {member.name} lacks reference log-probs; expected them on every chunk")
        num_tokens = member.versions.size
        verdict = 0.0 if member.score.masked else self.verdict(member, self.columns(member))
        return self.response_samples(member, np.full(num_tokens, verdict != 0.0), np.full(num_tokens, verdict))
