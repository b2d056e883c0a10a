"""Adapters of the families about losses: torch, float64."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from pipeline.algorithms.divergence import behavior_divergence
from pipeline.algorithms.entropy import entropy_from_logits, logprobs_from_logits
from pipeline.algorithms.importance import (
    approximate_proximal,
    correction_weights,
    importance_ratio,
    rejection_mask,
)
from pipeline.algorithms.kl import kl_estimate
from pipeline.algorithms.loss import token_loss
from pipeline.algorithms.objective import Importance, Objective, Surrogate
from pipeline.algorithms.surrogate import clipped_loss, log_ratio, positive_nll
from pipeline.ledger.contract import LedgerSpec, Unit
from pipeline.ledger.staleness import credit_limit
from tests.golden.adapters.batch import Rows, gradient

Case = Mapping[str, Any]


def policy_loss(inputs: Case) -> dict[str, Any]:
    """Clipped losses, GSPO, CISPO, positive-example NLL."""
    rows = Rows.of(inputs["response_mask"])
    if "mu" in inputs:
        return _positive_nll(inputs, rows)
    kind = inputs.get("kind", "clip")
    objective = Objective(
        clip_low=inputs["eps_low"],
        clip_high=inputs["eps_high"],
        dual_clip=inputs.get("dual_clip_c") or 0.0,
        surrogate=Surrogate(kind),
        importance=Importance.NONE,
    )
    mode = inputs.get("loss_agg_mode", "seq-mean-token-mean" if kind == "gspo" else "token-mean")
    outputs = _surrogate(inputs, rows, objective, mode, inputs["old_log_prob"], None)
    if kind == "clip" and inputs["dual_clip_c"] is None:  # those of OpenRLHF, whose metric is not clamped
        free = -log_ratio(rows.flat(inputs["log_prob"]), rows.flat(inputs["old_log_prob"]), limit=math.inf)
        outputs["approx_kl"] = rows.mean(free)
    return outputs


def _surrogate(
    inputs: Case,
    rows: Rows,
    objective: Objective,
    mode: str,
    old: list[list[float]],
    behavior: list[list[float]] | None,
) -> dict[str, Any]:
    logprobs = rows.flat(inputs["log_prob"], grad=True)
    proximal = rows.flat(old)
    losses, metrics = token_loss(
        objective,
        logprobs=logprobs,
        old_logprobs=proximal,
        behavior_logprobs=proximal if behavior is None else rows.flat(behavior),
        reference_logprobs=None,
        entropy=None,
        advantages=rows.flat(inputs["advantages"]),
        mask=rows.mask,
        row_ids=rows.row_ids,
        num_rows=rows.num_rows,
    )
    if inputs.get("is_weights") is not None:
        losses = losses * rows.flat(inputs["is_weights"])
    loss = (losses * rows.weights(mode)).sum()
    (grad,) = gradient(loss, logprobs)
    return {
        "loss": loss.item(),
        "grad_log_prob": rows.matrix(grad),
        "per_token_loss": rows.matrix(losses),
        "clipfrac": rows.mean(metrics["clip_fraction"]),
        "clipfrac_lower": rows.mean(metrics["dual_clip_fraction"]),
        "approx_kl": rows.mean(metrics["approx_kl"]),
    }


def _positive_nll(inputs: Case, rows: Rows) -> dict[str, Any]:
    logprobs = rows.flat(inputs["log_prob"], grad=True)
    rewards = torch.tensor(inputs["reward"], dtype=torch.float64)
    loss = positive_nll(logprobs, rows.mask, rows.row_ids, rewards)
    (grad,) = gradient(loss, logprobs)
    return {"nll": loss.item(), "weighted": inputs["mu"] * loss.item(), "grad_nll": rows.matrix(grad)}


def aggregation(inputs: Case) -> dict[str, Any]:
    """Aggregation modes, on one process and over ranks."""
    rows = Rows.of(inputs["loss_mask"])
    mode = inputs["loss_agg_mode"]
    weighted = rows.flat(inputs["loss_mat"]) * rows.weights(mode, inputs.get("loss_scale_factor"))
    if "split" not in inputs:
        return {"loss": weighted.sum().item()}
    ranks = [
        inputs["dp_size"] * weighted[(rows.row_ids >= start) & (rows.row_ids < end)].sum().item()
        for start, end in inputs["split"]
    ]
    return {"rank_losses": ranks, "whole": weighted.sum().item()}


def kl(inputs: Case) -> dict[str, Any]:
    """KL estimators and their gradients."""
    logprobs = torch.tensor(inputs["log_prob"], dtype=torch.float64, requires_grad=True)
    estimate = kl_estimate(logprobs, torch.tensor(inputs["ref_log_prob"], dtype=torch.float64), inputs["kind"])
    (grad,) = gradient(estimate.sum(), logprobs)
    return {"kl": estimate.tolist(), "grad_log_prob": grad.tolist()}


def entropy(inputs: Case) -> dict[str, Any]:
    """Entropy and log-probs from logits."""
    rows = Rows.of(inputs["response_mask"])
    logits = torch.tensor(inputs["logits"], dtype=torch.float64, requires_grad=True)
    values = entropy_from_logits(logits)
    (grad,) = gradient(values.reshape(-1)[rows.mask].sum(), logits)
    return {
        "entropy": values.tolist(),
        "log_prob": logprobs_from_logits(logits, torch.tensor(inputs["labels"])).tolist(),
        "entropy_token_mean": (values.reshape(-1) * rows.weights("token-mean")).sum().item(),
        "grad_logits": grad.tolist(),
    }


def tis(inputs: Case) -> dict[str, Any]:
    """Truncated importance sampling, IcePop, rejection masks, divergence metrics."""
    rows = Rows.of(inputs["response_mask"])
    old, behavior = rows.flat(inputs["old_log_prob"]), rows.flat(inputs["rollout_log_prob"])
    place = (old, behavior, rows.mask, rows.row_ids, rows.num_rows)
    if "option" in inputs:
        reduction, _, statistic = inputs["option"].rpartition("_")
        lower, upper = _bounds(inputs["threshold"])
        kept = rejection_mask(*place, reduction=reduction, statistic=statistic, upper=upper, lower=lower)
        return {"modified_mask": rows.matrix(kept.double())}
    if "threshold" in inputs:
        floor, cap = _bounds(inputs["threshold"])
        normalize = inputs["batch_normalize"]
        weights = correction_weights(*place, level=inputs["level"], cap=cap, floor=floor, batch_normalize=normalize)
        return {"weights": rows.matrix(weights)}
    return asdict(behavior_divergence(*place))


def _bounds(threshold: float | str) -> tuple[float | None, float]:
    """Read verl's ``upper`` or ``lower_upper``."""
    lower, _, upper = str(threshold).rpartition("_")
    return float(lower) if lower else None, float(upper)


def decoupled_ppo(inputs: Case) -> dict[str, Any]:
    """The decoupled objective, the approximated proximal policy, and the admission bound."""
    if "states" in inputs:
        return {"capacity": _capacity(inputs)}
    if "versions" in inputs:
        return _approximations(inputs)
    rows = Rows.of(inputs["response_mask"])
    selection = inputs["rejection_sampling"]
    settings = {
        "clip_low": inputs["eps_low"],
        "clip_high": inputs["eps_high"],
        "dual_clip": inputs["dual_clip_c"] or 0.0,
    }
    mode = _importance(selection)
    if mode is not None:
        objective = Objective(**settings, **mode)
        return _surrogate(inputs, rows, objective, "token-mean", inputs["prox_log_prob"], inputs["behave_log_prob"])
    logprobs = rows.flat(inputs["log_prob"], grad=True)
    proximal, behavior = rows.flat(inputs["prox_log_prob"]), rows.flat(inputs["behave_log_prob"])
    term = clipped_loss(log_ratio(logprobs, proximal).exp(), rows.flat(inputs["advantages"]), **settings)
    losses = term.loss * _selected_weights(selection, proximal, behavior, rows)
    loss = (losses * rows.weights("token-mean")).sum()
    (grad,) = gradient(loss, logprobs)
    return {"loss": loss.item(), "grad_log_prob": rows.matrix(grad)}


def _importance(selection: Case | None) -> dict[str, Any] | None:
    """Return the objective's setting that a selection means; None when it is a rejection that objectives do not offer."""
    if selection is None:
        return {"importance": Importance.NONE}
    if selection["level"] != "token" or selection["metric"] != "ratio":
        return None
    upper, lower = selection["upper"], selection["lower"] or 0.0
    if selection["action"] == "clamp":
        return {"importance": Importance.TIS, "importance_cap": upper} if not lower else None
    return {"importance": Importance.ICEPOP, "importance_cap": upper, "importance_floor": lower}


def _selected_weights(selection: Case, proximal: Tensor, behavior: Tensor, rows: Rows) -> Tensor:
    """Return the behaviour weights under a selection by rows, or by another quantity than the ratio."""
    place = (rows.mask, rows.row_ids, rows.num_rows)
    upper, lower = selection["upper"], selection["lower"]
    if selection["metric"] == "ratio":  # AReaL's ratio of a row is the geometric mean
        return correction_weights(proximal, behavior, *place, level="geometric", cap=upper, floor=lower)
    # AReaL takes its divergences from the other side: behaviour over proximal
    kept = rejection_mask(
        behavior,
        proximal,
        *place,
        reduction="token" if selection["level"] == "token" else "seq_mean",
        statistic=selection["metric"].removeprefix("kl_"),
        upper=upper,
        lower=lower,
    )
    return importance_ratio(proximal, behavior) * kept


def _approximations(inputs: Case) -> dict[str, Any]:
    def read(name: str) -> Tensor:
        return torch.tensor(inputs[name], dtype=torch.float64)

    behavior, current, versions = read("behave_log_prob"), read("log_prob"), torch.tensor(inputs["versions"])
    return {
        name: approximate_proximal(
            behavior, current, versions, current_version=inputs["current_version"], linear=name == "linear"
        ).tolist()
        for name in ("loglinear", "linear")
    }


def _capacity(inputs: Case) -> list[int]:
    spec = LedgerSpec(
        run="golden",
        unit=Unit.TRAJECTORY,
        group_size=1,
        units_per_update=inputs["batch"],
        eta=inputs["max_staleness"],
    )
    return [
        min(inputs["max_concurrent"] - running, credit_limit(spec, version) - (accepted + running))
        for version, accepted, running in inputs["states"]
    ]
