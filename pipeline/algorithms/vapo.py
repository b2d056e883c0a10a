"""VAPO: value-based augmented PPO (2504.05118), on VC-PPO (2503.01491).

    decoupled GAE      policy: lambda(l) = 1 - 1/(alpha l), alpha = 0.05, at least 0; the paper's is negative below l = 20
                       critic: Monte-Carlo (lambda = 1), by the value process, pretrained before the policy starts
    clip-higher        eps_low 0.2, eps_high 0.28
    token-level loss   mean over all tokens of the batch
    imitation          + mu NLL, mean over the tokens of right responses, mu = 0.1
    group sampling     several responses a prompt; the baseline is the critic's all the same

Everything except the values' training is a setting, so the rule is PPO with other defaults. The
unit is a trajectory, or a whole group with dynamic sampling, since only a group can lack signal.
Over-long shaping and filtering come with the reward. Whitening is ours, as in public PPO code: the
paper leaves it open. Meaningless without pretraining the critic (the paper: 11 instead of 60 on
AIME 2024), or with lambda = 1 for the policy, the worst that VC-PPO tried."""

from __future__ import annotations

from typing import ClassVar

from pipeline.algorithms.critic_rule import CriticRule
from pipeline.algorithms.ppo import Ppo
from pipeline.config.catalogue import Declaration
from pipeline.ledger.types import Unit


class Vapo(CriticRule):
    __slots__ = ()
    declaration: ClassVar[Declaration] = Declaration(
        Unit.TRAJECTORY,
        has_critic=True,
        has_group_baseline=False,
        # the filter reads every accuracy of a group
        filtered_unit=Unit.GROUP,
    )

    class Settings(
        CriticRule.Settings,
        defaults={"dynamic_sampling": False, "adaptive_lambda_alpha": 0.05, "positive_nll_coefficient": 0.1},
    ):
        pass

    token_spans = Ppo.token_spans
