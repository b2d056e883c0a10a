"""Adapters of the families about value models: GAE, EGAE, value loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from pipeline.algorithms import gae as estimators
from pipeline.algorithms.advantage import reward_to_go, whiten
from pipeline.algorithms.value_loss import clipped_value_loss, finished_row_weights
from tests.golden.adapters.batch import Rows, gradient

Case = Mapping[str, Any]


def gae(inputs: Case) -> dict[str, Any]:
    """GAE, raw and whitened."""
    mask = np.array(inputs["response_mask"], dtype=bool)
    values = np.array(inputs["values"], dtype=np.float64)
    rewards = np.array(inputs["token_level_rewards"], dtype=np.float64)
    raw = estimators.gae(rewards, values, mask, gamma=inputs["gamma"], lam=inputs["lam"])
    return {
        "advantages_raw": raw.tolist(),
        "advantages_whitened": whiten(raw, mask).tolist(),
        "returns": (raw + values).tolist(),
    }


def gae_vapo(inputs: Case) -> dict[str, Any]:
    """Decoupled, length-adaptive GAE and its table of lambdas."""
    if "rows" in inputs:
        alphas, lengths = (np.array(column, dtype=np.float64) for column in zip(*inputs["rows"], strict=True))
        floors = {"vapo": None, "nemo_clamp": 0.0, "tppo_floor": 0.95}
        return {
            name: estimators.adaptive_lambda(lengths, alpha=alphas, floor=floor).tolist()
            for name, floor in floors.items()
        }
    mask = np.array(inputs["response_mask"], dtype=bool)
    values = np.array(inputs["values"], dtype=np.float64)
    rewards = np.zeros(mask.shape)
    for row, reward in enumerate(inputs["reward"]):
        rewards[row, np.flatnonzero(mask[row])[-1:]] = reward
    lam = estimators.adaptive_lambda(mask.sum(axis=1).astype(np.float64), alpha=inputs["alpha"])
    gamma, lam_value = inputs["gamma"], inputs["lambda_value"]
    return {
        "lambda_policy": lam.tolist(),
        "advantages": estimators.gae(rewards, values, mask, gamma=gamma, lam=lam).tolist(),
        "returns": (estimators.gae(rewards, values, mask, gamma=gamma, lam=lam_value) + values).tolist(),
    }


def egae(inputs: Case) -> dict[str, Any]:
    """EGAE of windows: deltas, advantages, masks, value targets."""
    names = ("delta", "advantages", "policy_mask", "value_targets", "value_mask")
    outputs: dict[str, list[list[float]]] = {name: [] for name in names}
    gamma = inputs["gamma"]
    for row, is_finished in enumerate(inputs["finished"]):
        start, length = inputs["start"][row], inputs["n_new"][row]
        rewards = np.array(inputs["rewards"][row], dtype=np.float64)
        values = np.array(inputs["values"][row], dtype=np.float64)
        following = inputs["v_next"][row] if inputs["bootstrap"] == "next" else None
        deltas = estimators.window_deltas(rewards, values, is_finished=is_finished, gamma=gamma, next_value=following)
        whole = np.concatenate([np.zeros(start), rewards])[None]
        targets = reward_to_go(whole, np.ones(whole.shape, dtype=bool), gamma=gamma)[0]
        mask = estimators.window_policy_mask(length, is_finished=is_finished, num_ignored=inputs["ignore_last_tokens"])
        for name, array in zip(
            names,
            (
                deltas,
                estimators.egae(deltas, gamma=gamma, lam=inputs["lam"][row]),
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
    mask = np.array(inputs["response_mask"], dtype=bool)
    rewards = np.array(inputs["rewards"], dtype=np.float64)
    values = np.array(inputs["values"], dtype=np.float64)
    finished = np.array(inputs["finished"], dtype=bool)
    raw, trained = np.zeros(mask.shape), np.zeros(mask.shape, dtype=bool)
    for row, length in enumerate(mask.sum(axis=1)):
        deltas = estimators.window_deltas(
            rewards[row, :length], values[row, :length], is_finished=bool(finished[row]), gamma=inputs["gamma"]
        )
        raw[row, :length] = estimators.egae(deltas, gamma=inputs["gamma"], lam=inputs["lam"])
        trained[row, :length] = estimators.window_policy_mask(
            int(length), is_finished=bool(finished[row]), num_ignored=inputs["ignore_last"]
        )
    returns = reward_to_go(rewards, mask, gamma=inputs["gamma"]) * finished[:, None]
    return {
        "advantages_raw": np.where(trained, raw, 0.0).tolist(),
        "advantages": [row.tolist() for row in estimators.whiten_windows([*raw], [*trained], clamp=inputs["clamp"])],
        "returns": returns.tolist(),
        "train_mask": trained.astype(int).tolist(),
    }


def value_loss(inputs: Case) -> dict[str, Any]:
    """Clipped value loss, and T-PPO's aggregation over finished rows."""
    rows = Rows.of(inputs["response_mask"])
    values = rows.flat(inputs["vpreds"], grad=True)
    term = clipped_value_loss(
        values,
        rows.flat(inputs["old_values"]),
        rows.flat(inputs["returns"]),
        clip_low=inputs["cliprange_low"],
        clip_high=inputs["cliprange_high"],
    )
    if "finished" in inputs:
        by_row = finished_row_weights(rows.counts(), np.array(inputs["finished"], dtype=bool))
        weights = torch.from_numpy(by_row)[rows.row_ids] * rows.mask
    else:
        weights = rows.weights(inputs["loss_agg_mode"])
    loss = (term.loss * weights).sum()
    (grad,) = gradient(loss, values)
    return {"loss": loss.item(), "grad_vpreds": rows.matrix(grad), "clipfrac": rows.mean(term.clipped)}
