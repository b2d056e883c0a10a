"""Adapters of the families about groups and rewards: numpy and plain Python."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from pipeline.algorithms.group_rule import Responses
from pipeline.algorithms.grpo import DrGrpo, Grpo
from pipeline.algorithms.reinforce import ReinforcePlusPlusBaseline
from pipeline.algorithms.rloo import Rloo
from pipeline.algorithms.terms.advantage import GROUP_EPSILON, discounted_sums, whiten_rows
from pipeline.rewards.dapo_math import score
from pipeline.rewards.shaping import soft_overlong_penalty
from tests.rules import make_rule

Case = Mapping[str, Any]


def group_advantage(inputs: Case) -> dict[str, Any]:
    """Outcome advantages, by the rules that take them."""
    mask = np.array(inputs["response_mask"], dtype=bool)
    kind = inputs["kind"]
    # The rewards of this kind may come at any token; those of a run come at the last.
    if kind == "reinforce_pp":
        returns = np.zeros(mask.shape)
        for row, kept in enumerate(mask):
            rewards = np.array(inputs["token_level_rewards"][row], dtype=np.float64)[kept]
            returns[row, kept] = discounted_sums(rewards, inputs["gamma"])
        return {"returns": returns.tolist(), "advantages": [row.tolist() for row in whiten_rows([*returns], [*mask])]}
    if inputs.get("epsilon", GROUP_EPSILON) != GROUP_EPSILON:
        raise ValueError(f"epsilon is {inputs['epsilon']}; expected {GROUP_EPSILON}, which is no setting")
    rules = {"grpo": Grpo, "grpo_nostd": DrGrpo, "rloo": Rloo, "rfpp_baseline": ReinforcePlusPlusBaseline}
    rule = make_rule(rules[kind])
    responses = Responses(
        rewards=np.array(inputs["reward"], dtype=np.float64), groups=np.array(inputs["group_id"]), masks=tuple(mask)
    )
    advantages = rule.advantages(responses)
    return {
        "advantages": [row.tolist() for row in advantages],
        "scalar_advantage": [row[0].item() for row in advantages],
    }


def overlong(inputs: Case) -> dict[str, Any]:
    """Soft over-long punishment."""
    limits = {"max_tokens": inputs["l_max"], "cache_tokens": inputs["l_cache"], "factor": inputs["factor"]}
    return {"penalty": soft_overlong_penalty(inputs["lengths"], **limits).tolist()}


def math_verifier(inputs: Case) -> dict[str, Any]:
    """DAPO's rule-based verifier."""
    result = score(inputs["solution"], inputs["ground_truth"])
    return {"score": result.score, "acc": result.acc, "pred": result.pred}
