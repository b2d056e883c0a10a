"""Adapters of the families about value models: GAE, EGAE, value loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from pipeline.algorithms.assemble import SampledSequence
from pipeline.algorithms.critic_rule import TokenSpan
from pipeline.algorithms.terms.advantage import discounted_sums, terminal_rewards, whiten_rows
from pipeline.algorithms.terms.clip import clipped_value_loss
from pipeline.algorithms.terms.gae import (
    adaptive_lambda,
    lambda_targets,
    whiten_windows,
    window_deltas,
    window_policy_mask,
)
from pipeline.algorithms.vapo import Vapo
from pipeline.config.learning import Aggregation, ValueSection
from protocol.trajectory import RewardScore
from tests.golden.adapters.batch import Rows, gradient
from tests.rules import make_rule
from workers.engines.value.regression import response_weights

Case = Mapping[str, Any]


def gae(inputs: Case) -> dict[str, Any]:
    """GAE, raw and whitened. A place off the mask is no token of the response and is left out. The
    rest is a finished window."""
    mask, gamma, lam = np.array(inputs["response_mask"], dtype=bool), inputs["gamma"], inputs["lam"]
    raw, returns = np.zeros(mask.shape), np.zeros(mask.shape)
    for row, kept in enumerate(mask):
        rewards = np.array(inputs["token_level_rewards"][row], dtype=np.float64)[kept]
        values = np.array(inputs["values"][row], dtype=np.float64)[kept]
        deltas = window_deltas(rewards, values, is_finished=True, gamma=gamma)
        raw[row, kept] = discounted_sums(deltas, gamma * lam)
        returns[row, kept] = lambda_targets(rewards, values, gamma=gamma, lam=lam)
    return {
        "advantages_raw": raw.tolist(),
        "advantages_whitened": [row.tolist() for row in whiten_rows([*raw], [*mask])],
        "returns": returns.tolist(),
    }


def gae_vapo(inputs: Case) -> dict[str, Any]:
    """Decoupled, length-adaptive GAE by VAPO's rule, and its table of lambdas."""
    if "rows" in inputs:
        floors = {"vapo": -np.inf, "nemo_clamp": 0.0, "tppo_floor": 0.95}
        return {
            name: [adaptive_lambda(length, alpha=alpha, floor=floor) for alpha, length in inputs["rows"]]
            for name, floor in floors.items()
        }
    mask, gamma = np.array(inputs["response_mask"], dtype=bool), inputs["gamma"]
    rule = make_rule(Vapo, gamma=gamma, adaptive_lambda_alpha=inputs["alpha"])
    advantages, returns, lambdas = np.zeros(mask.shape), np.zeros(mask.shape), list[float]()
    for row, kept in enumerate(mask):
        values, reward = np.array(inputs["values"][row], dtype=np.float64)[kept], inputs["reward"][row]
        stretch = _finished_stretch(values, reward)
        lambdas.append(rule.policy_lambda(stretch))
        advantages[row, kept] = rule.advantages(stretch)
        rewards = terminal_rewards(reward, values.size)
        returns[row, kept] = lambda_targets(rewards, values, gamma=gamma, lam=inputs["lambda_value"])
    return {"lambda_policy": lambdas, "advantages": advantages.tolist(), "returns": returns.tolist()}


def _finished_stretch(values: np.ndarray, reward: float) -> TokenSpan:
    return TokenSpan(
        name="golden",
        sequences=(SampledSequence(np.zeros(1 + values.size, dtype=np.int32), 1),),
        num_earlier=0,
        behavior_logprobs=np.zeros(values.size, dtype=np.float32),
        versions=np.zeros(values.size, dtype=np.int32),
        values=values,
        reference_logprobs=None,
        score=RewardScore(reward=reward, accuracy=float(reward > 0)),
    )


def egae(inputs: Case) -> dict[str, Any]:
    """EGAE of windows: deltas, advantages, masks, value targets."""
    names = ("delta", "advantages", "policy_mask", "value_targets", "value_mask")
    outputs: dict[str, list[list[float]]] = {name: [] for name in names}
    gamma = inputs["gamma"]
    for row, is_finished in enumerate(inputs["finished"]):
        start, length = inputs["start"][row], inputs["n_new"][row]
        rewards = np.array(inputs["rewards"][row], dtype=np.float64)
        values = np.array(inputs["values"][row], dtype=np.float64)
        bootstrapped, is_closed = rewards.copy(), is_finished
        if inputs["bootstrap"] == "next" and not is_finished:
            # not T-PPO, and no option here: a window that is closed by the value after it, received
            # as a reward
            bootstrapped[-1] += gamma * inputs["v_next"][row]
            is_closed = True
        deltas = window_deltas(bootstrapped, values, is_finished=is_closed, gamma=gamma)
        whole = np.concatenate([np.zeros(start), rewards])
        mask = window_policy_mask(length, is_finished=is_finished, num_ignored=inputs["ignore_last_tokens"])
        targets = lambda_targets(whole, np.zeros(whole.size), gamma=gamma, lam=1.0)
        for name, array in zip(
            names,
            (
                deltas,
                discounted_sums(deltas, gamma * inputs["lam"][row]),
                mask.astype(int),
                targets if is_finished else np.zeros(start + length),
                np.full(start + length, int(is_finished)),
            ),
            strict=True,
        ):
            outputs[name].append(array.tolist())
    return outputs


def egae_batch(inputs: Case) -> dict[str, Any]:
    """EGAE of a batch: tail drop, whitening, clamp, targets."""
    mask, gamma = np.array(inputs["response_mask"], dtype=bool), inputs["gamma"]
    rewards = np.array(inputs["rewards"], dtype=np.float64)
    values = np.array(inputs["values"], dtype=np.float64)
    raw, returns, trained = np.zeros(mask.shape), np.zeros(mask.shape), np.zeros(mask.shape, dtype=bool)
    for row, is_finished in enumerate(inputs["finished"]):
        window = slice(int(mask[row].sum()))
        kept, state_values = rewards[row, window], values[row, window]
        deltas = window_deltas(kept, state_values, is_finished=is_finished, gamma=gamma)
        raw[row, window] = discounted_sums(deltas, gamma * inputs["lam"])
        trained[row, window] = window_policy_mask(kept.size, is_finished=is_finished, num_ignored=inputs["ignore_last"])
        if is_finished:
            returns[row, window] = lambda_targets(kept, state_values, gamma=gamma, lam=1.0)
    return {
        "advantages_raw": np.where(trained, raw, 0.0).tolist(),
        "advantages": [row.tolist() for row in whiten_windows([*raw], [*trained], clamp=inputs["clamp"])],
        "returns": returns.tolist(),
        "train_mask": trained.astype(int).tolist(),
    }


def value_loss(inputs: Case) -> dict[str, Any]:
    """Clipped value loss; and T-PPO's mean over finished responses, by the number of
    all of them."""
    rows = Rows.of(inputs["response_mask"])
    values = rows.flat(inputs["vpreds"], grad=True)
    term = clipped_value_loss(
        values,
        rows.flat(inputs["old_values"]),
        rows.flat(inputs["returns"]),
        ValueSection(clip_low=inputs["cliprange_low"], clip_high=inputs["cliprange_high"]),
    )
    if "finished" in inputs:
        weights = torch.zeros(rows.num_rows, rows.width, dtype=torch.float64)
        masks = rows.mask.reshape(weights.shape)
        for row, (mask, is_finished) in enumerate(zip(masks, inputs["finished"], strict=True)):
            if is_finished and mask.any():
                weights[row, mask] = torch.from_numpy(response_weights(int(mask.sum()), rows.num_rows))
        weights = weights.reshape(-1)
    else:
        mode = Aggregation(inputs["loss_agg_mode"])
        weights = rows.weights(make_rule(loss_aggregation=mode, norm_length=float(rows.width)))
    loss = (term.loss * weights).sum()
    (grad,) = gradient(loss, values)
    return {"loss": loss.item(), "grad_vpreds": rows.matrix(grad), "clipfrac": rows.mean(term.clipped)}
