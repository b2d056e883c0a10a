"""DAPO: decoupled clip and dynamic sampling policy optimisation (2503.14476).

*Consumes* complete groups. *Produces* one training sample a response. *Waits for* nothing.

    A_i = (R_i - mean_j R_j) / (std_j R_j + 1e-6)                             for every token of response i
    loss = sum_{i,t} max(-A_i r_{i,t}, -A_i clip(r_{i,t}, 1 - eps_low, 1 + eps_high)) / sum_i |o_i|
    over groups with 0 < #{right} < G

It is meaningless for groups of one response, and learns nothing from groups that are all right or all wrong; the ledger drops
those by their raw accuracy. Differences from the paper: a dual clip (as in the authors' recipe) and, since sampling runs ahead
of learning here, a truncated importance weight; both can be switched off.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from pipeline.algorithms.advantage import group_advantages
from pipeline.algorithms.aggregation import Aggregation
from pipeline.algorithms.assemble import AssembledTrajectory, assemble
from pipeline.algorithms.kl import KLEstimator
from pipeline.algorithms.objective import Importance, Objective, Surrogate
from pipeline.batching import TrainingSample
from pipeline.config.schema import RunConfig
from pipeline.replay.buffer import ClaimedUnit, Unit
from protocol.errors import LedgerError
from protocol.trajectory import Field


@dataclass(frozen=True, slots=True)
class Dapo:
    """DAPO's learning rule."""

    name: ClassVar[str] = "dapo"
    unit: ClassVar[Unit] = Unit.GROUP
    objective: Objective
    fields: frozenset[Field] = frozenset({Field.REWARD})
    group_size: int = 16
    signal_filter: bool = True
    normalize_std: bool = True

    @classmethod
    def from_config(cls, config: RunConfig) -> Dapo:
        """Read the algorithm section of a run's configuration."""
        section = config.algorithm
        objective = Objective(
            clip_low=section.clip_low,
            clip_high=section.clip_high,
            dual_clip=section.dual_clip,
            surrogate=Surrogate(section.surrogate),
            aggregation=Aggregation(section.loss_aggregation),
            norm_length=float(config.generation.max_response_tokens),
            importance=Importance(section.importance),
            importance_cap=section.importance_cap,
            importance_floor=section.importance_floor,
            kl_coefficient=section.kl_coefficient,
            kl_estimator=KLEstimator(section.kl_estimator),
            entropy_coefficient=section.entropy_coefficient,
        )
        fields = {Field.REWARD, Field.REFERENCE} if config.needs_reference else {Field.REWARD}
        return cls(
            objective=objective,
            fields=frozenset(fields),
            group_size=section.group_size,
            signal_filter=section.dynamic_sampling,
            normalize_std=section.normalize_std,
        )

    def prepare(self, units: Sequence[ClaimedUnit]) -> list[TrainingSample]:
        """Make one sample a response: group advantages, and no loss on responses under over-long filtering.

        A response without loss still counts in its group's mean and std.

        Raises:
            NonFiniteUnit: A unit holds NaN or infinity.
            LedgerError: A unit is not a complete group of consistent trajectories.
        """
        return [sample for unit in units for sample in self._group(unit)]

    def _group(self, unit: ClaimedUnit) -> list[TrainingSample]:
        members = [assemble(unit.name, chunks) for chunks in unit.trajectories]
        if len(members) != self.group_size:
            raise LedgerError(
                f"group {unit.name} came with {len(members)} responses; expected {self.group_size}: a baseline over a part of "
                "a group is biased"
            )
        if Field.REFERENCE in self.fields:
            self._check_reference(unit.name, members)
        rewards = np.array([member.score.reward for member in members], dtype=np.float64)
        advantages = group_advantages(rewards, np.zeros(rewards.size, dtype=np.int64), normalize_std=self.normalize_std)
        return [_sample(member, advantage) for member, advantage in zip(members, advantages, strict=True)]

    def _check_reference(self, unit: str, members: Sequence[AssembledTrajectory]) -> None:
        for member in members:
            if member.reference_logprobs is None:
                raise LedgerError(
                    f"group {unit}: trajectory {member.name} lacks reference log-probs; expected them on every chunk: "
                    "this run's ledger holds a unit back until they are there"
                )


def _sample(member: AssembledTrajectory, advantage: float) -> TrainingSample:
    length = member.versions.size
    return TrainingSample(
        name=member.name,
        tokens=member.tokens,
        prompt_length=member.prompt_length,
        loss_mask=np.full(length, not member.score.masked),
        advantages=np.full(length, advantage, dtype=np.float32),
        behavior_logprobs=member.behavior_logprobs,
        versions=member.versions,
        reference_logprobs=member.reference_logprobs,
        reward=member.score.reward,
        accuracy=member.score.accuracy,
    )
