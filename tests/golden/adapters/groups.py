"""Adapters of the families about groups, filters and rewards: numpy and plain Python."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from pipeline.algorithms import advantage, filters
from pipeline.algorithms import segments as provenance
from pipeline.rewards.dapo_math import score
from pipeline.rewards.overlong import soft_overlong_penalty
from protocol.trajectory import Segment

Case = Mapping[str, Any]


def group_advantage(inputs: Case) -> dict[str, Any]:
    """Outcome advantages."""
    mask = np.array(inputs["response_mask"], dtype=bool)
    kind = inputs["kind"]
    if kind == "reinforce_pp":
        rewards = np.array(inputs["token_level_rewards"], dtype=np.float64)
        returns = advantage.reward_to_go(rewards, mask, gamma=inputs["gamma"])
        return {"returns": returns.tolist(), "advantages": advantage.whiten(returns, mask).tolist()}
    rewards, groups = np.array(inputs["reward"], dtype=np.float64), np.array(inputs["group_id"])
    if kind == "rfpp_baseline":
        return {"advantages": advantage.group_baseline_advantages(rewards, groups, mask).tolist()}
    if kind == "rloo":
        scalars = advantage.leave_one_out_advantages(rewards, groups)
    elif kind in ("grpo", "grpo_nostd"):
        scalars = advantage.group_advantages(rewards, groups, normalize_std=kind == "grpo", epsilon=inputs["epsilon"])
    else:
        raise ValueError(f"kind is {kind!r}; expected grpo, grpo_nostd, rloo, rfpp_baseline or reinforce_pp")
    return {"scalar_advantage": scalars.tolist(), "advantages": (scalars[:, None] * mask).tolist()}


def dynamic_sampling(inputs: Case) -> dict[str, Any]:
    """The filter loop, its error included."""
    loop = filters.DynamicSampling[int](inputs["train_batch_size"], inputs["max_num_gen_batches"])
    batches = iter(inputs["gen_batches"])
    while loop.state is filters.SamplingState.SAMPLING and (batch := next(batches, None)) is not None:
        loop.offer([(uid, [float(value) for value in accuracies]) for uid, accuracies in batch])
    words = {filters.SamplingState.FULL: "ok", filters.SamplingState.HOPELESS: "error_too_many"}
    return {
        "num_gen_batches": loop.num_generation_batches,
        "kept_uids": loop.kept,
        "batch_uids": loop.batch,
        "status": words.get(loop.state, str(loop.state)),
    }


def group_rules(inputs: Case) -> dict[str, Any]:
    """When a group is trained, evicted or dropped; and T-PPO's running filter."""
    if "steps" in inputs:
        running = filters.RunningSignal[int]()
        per_step: list[dict[str, list[int]]] = []
        for step in inputs["steps"]:
            for uid, members in step:
                running.observe(uid, [value for is_finished, value in members if is_finished])
            per_step.append({"with_gradient": sorted(running.with_signal())})
        return {"per_step": per_step}
    members = [
        filters.FinishedMember(member["first_version"], member["finish_version"], float(member["acc"]))
        for member in inputs["members"]
    ]
    judgement = filters.judge_group(members, eta=inputs["max_staleness"])
    advantages: list[float] = []
    if judgement.verdict is filters.GroupVerdict.TRAIN:
        rewards = np.array([2.0 * member.accuracy - 1.0 for member in members])
        advantages = advantage.group_advantages(rewards, np.zeros(len(members), dtype=int)).tolist()
    return {
        "ready_version": judgement.ready_version,
        "age": judgement.age,
        "state": str(judgement.verdict),
        "advantages": advantages,
    }


def segments(inputs: Case) -> dict[str, Any]:
    """Per-token versions and log-probs of a trajectory of several versions."""
    current, eta = inputs["current_version"], inputs["max_staleness"]
    whole = provenance.join(
        ([Segment(part["version"], len(part["logps"]))], np.array(part["logps"], dtype=np.float64))
        for part in inputs["segments"]
    )
    return {
        "versions": whole.versions.tolist(),
        "behave_log_prob": whole.behavior_logprobs.tolist(),
        "span": whole.span,
        "staleness_newest": whole.staleness_newest(current),
        "staleness_worst": whole.staleness_worst(current),
        "keep": whole.is_fresh(current, eta),
        "on_policy_mask": whole.on_policy_mask(current).astype(int).tolist(),
    }


def overlong(inputs: Case) -> dict[str, Any]:
    """Soft over-long punishment."""
    limits = {"max_tokens": inputs["l_max"], "cache_tokens": inputs["l_cache"], "factor": inputs["factor"]}
    return {"penalty": soft_overlong_penalty(inputs["lengths"], **limits).tolist()}


def math_verifier(inputs: Case) -> dict[str, Any]:
    """DAPO's rule-based verifier."""
    result = score(inputs["solution"], inputs["ground_truth"])
    return {"score": result.score, "acc": result.acc, "pred": result.pred}
