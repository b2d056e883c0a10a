"""PPO (1707.06347) with GAE (1506.02438): the full-rollout baseline of VAPO and T-PPO.

    A_t = sum_k (gamma lambda)^k delta_{t+k} over the whole response, lambda fixed (0.95), whitened over the batch
    loss = token mean of max(-A r, -A clip(r, 1 - eps, 1 + eps))

Needs no group: one response per prompt is enough. Meaningless with an untrained critic: with lambda
below 1 a final reward is worth ``lambda^100`` a hundred tokens earlier, half a percent at 0.95, so
the critic must carry it. The learner's critic gate waits for that.

Values are computed when each chunk is cut, so they may be older than the learner's version. They
are only a baseline: their age never makes the ratio wrong, but costs variance and, for lambda below
1, a bias of the order of the critic's change since."""

from __future__ import annotations

from typing import ClassVar

from pipeline.algorithms.assemble import assemble, has_verdict
from pipeline.algorithms.critic_rule import CriticRule, TokenSpan
from pipeline.config.catalogue import Declaration
from pipeline.config.learning import SYMMETRIC
from pipeline.ledger.types import ClaimedUnit, Unit
from protocol.errors import LedgerError
from protocol.trajectory import Field


class Ppo(CriticRule):
    __slots__ = ()
    declaration: ClassVar[Declaration] = Declaration(Unit.TRAJECTORY, has_critic=True, has_group_baseline=False)

    class Settings(CriticRule.Settings, defaults=SYMMETRIC):
        pass

    def token_spans(self, unit: ClaimedUnit) -> list[TokenSpan]:
        """Return each response of a unit as one span, but not a group's without a verdict. Raises
        NonFiniteUnit, LedgerError."""
        found: list[TokenSpan] = []
        for chunks in unit.trajectories:
            if len(unit.trajectories) > 1 and not has_verdict(chunks):
                continue
            member = assemble(unit.name, chunks)
            if member.values is None:
                raise LedgerError(
                    f"unit {unit.name}: trajectory {member.name} lacks values; expected them on every chunk"
                )
            if Field.REFERENCE in self.fields and member.reference_logprobs is None:
                raise LedgerError(f"unit {unit.name}: trajectory {member.name} lacks reference log-probs on some chunk")
            found.append(
                TokenSpan(
                    name=member.name,
                    sequences=member.sequences,
                    num_earlier=0,
                    behavior_logprobs=member.behavior_logprobs,
                    versions=member.versions,
                    values=member.values,
                    reference_logprobs=member.reference_logprobs,
                    score=member.score,
                    guidance=member.guidance,
                )
            )
        return found
