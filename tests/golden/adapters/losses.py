"""Adapters of the families about losses: torch, float64."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipeline.algorithms.base import Rule
from pipeline.algorithms.cispo import Cispo
from pipeline.algorithms.dapo import Dapo
from pipeline.algorithms.gspo import Gspo
from pipeline.algorithms.loss import imitation_loss
from pipeline.algorithms.loss import policy_loss as loss_of
from pipeline.algorithms.terms.guidance import is_right
from pipeline.algorithms.terms.importance import approximate_proximal, mean_weight
from pipeline.algorithms.terms.kl import kl_estimate, row_divergence
from pipeline.config.learning import Aggregation, Importance, ImportanceLevel, KLEstimator, Rejection, RejectionLevel
from protocol.trajectory import RewardScore
from tests.golden.adapters.batch import Rows, gradient
from tests.golden.adapters.ledger import capacity, in_memory
from tests.rules import make_rule, with_settings
from workers.engines.model.head import Entropy, score_logits

Case = Mapping[str, Any]
Metrics = dict[str, Tensor]


def policy_loss(inputs: Case) -> dict[str, Any]:
    """Clipped losses, GSPO, CISPO, positive-example NLL."""
    rows = Rows.of(inputs["response_mask"])
    if "mu" in inputs:
        return _imitation(inputs, rows)
    kind = inputs.get("kind", "clip")
    mode = inputs.get("loss_agg_mode", "seq-mean-token-mean" if kind == "gspo" else "token-mean")
    weights, old = inputs.get("is_weights"), rows.flat(inputs["old_log_prob"])
    objective = make_rule(
        clip_low=inputs["eps_low"],
        clip_high=inputs["eps_high"],
        dual_clip=inputs.get("dual_clip_c") or 0.0,
        kind={"clip": Dapo, "gspo": Gspo, "cispo": Cispo}[kind],
        loss_aggregation=Aggregation(mode),
        norm_length=float(rows.width),
        importance=Importance.NONE if weights is None else Importance.DECOUPLED,
    )
    # the behaviour policy under which a token has the weight that is given
    behavior = old if weights is None else old - rows.flat(weights).log()
    outputs, losses, metrics = _loss(inputs, rows, objective, old, behavior)
    approx_kl = metrics["approx_kl"]
    # those of OpenRLHF, whose metric is not clamped
    if kind == "clip" and inputs["dual_clip_c"] is None:
        approx_kl = kl_estimate(old, rows.flat(inputs["log_prob"]), KLEstimator.K1)
    return outputs | {
        "per_token_loss": rows.matrix(losses),
        "clipfrac": rows.mean(metrics["clip_fraction"]),
        "clipfrac_lower": rows.mean(metrics["dual_clip_fraction"]),
        "approx_kl": rows.mean(approx_kl),
    }


def _loss(
    inputs: Case, rows: Rows, objective: Rule, old: Tensor, behavior: Tensor
) -> tuple[dict[str, Any], Tensor, Metrics]:
    """Return loss and gradient of a batch, and the loss and the metrics of each token."""
    logprobs = rows.flat(inputs["log_prob"], grad=True)
    losses, metrics = _token_loss(
        rows, objective, logprobs=logprobs, old=old, behavior=behavior, advantages=rows.flat(inputs["advantages"])
    )
    loss = (losses * rows.weights(objective)).sum()
    (grad,) = gradient(loss, logprobs)
    return {"loss": loss.item(), "grad_log_prob": rows.matrix(grad)}, losses, metrics


def _token_loss(
    rows: Rows,
    objective: Rule,
    *,
    logprobs: Tensor,
    old: Tensor,
    behavior: Tensor,
    advantages: Tensor,
    mean: float = 1.0,
) -> tuple[Tensor, Metrics]:
    return loss_of(
        objective,
        logprobs=logprobs,
        old_logprobs=old,
        behavior_logprobs=behavior,
        reference_logprobs=None,
        entropy=None,
        advantages=advantages,
        mask=rows.mask,
        row_ids=rows.row_ids,
        num_rows=rows.num_rows,
        mean_weight=mean,
    )


def _imitation(inputs: Case, rows: Rows) -> dict[str, Any]:
    logprobs = rows.flat(inputs["log_prob"], grad=True)
    right = [is_right(RewardScore(reward=reward, accuracy=float(reward > 0))) for reward in inputs["reward"]]
    samples = rows.samples(is_imitated=right)
    masks = [np.zeros(rows.width, np.bool_) if sample.nll_mask is None else sample.nll_mask for sample in samples]
    losses = imitation_loss(logprobs, torch.from_numpy(np.concatenate(masks)))

    def weighted(coefficient: float) -> Tensor:
        weights = make_rule(positive_nll_coefficient=coefficient).imitation_weights(samples)
        return (losses * torch.from_numpy(np.concatenate(weights))).sum()

    (grad,) = gradient(weighted(1.0), logprobs)
    nll, part = weighted(1.0), weighted(inputs["mu"])
    return {"nll": nll.item(), "weighted": part.item(), "grad_nll": rows.matrix(grad)}


def aggregation(inputs: Case) -> dict[str, Any]:
    """Aggregation modes, on one process and over ranks."""
    rows = Rows.of(inputs["loss_mask"])
    norm_length = float(inputs.get("loss_scale_factor") or rows.width)
    objective = make_rule(loss_aggregation=Aggregation(inputs["loss_agg_mode"]), norm_length=norm_length)
    weighted = rows.flat(inputs["loss_mat"]) * rows.weights(objective)
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
    labels = torch.tensor(inputs["labels"]).reshape(-1)
    logprobs, values = score_logits(logits.flatten(0, 1), labels, 1.0, Entropy.DIFFERENTIATE)
    assert values is not None
    (grad,) = gradient(values[rows.mask].sum(), logits)
    return {
        "entropy": rows.matrix(values),
        "log_prob": rows.matrix(logprobs),
        "entropy_token_mean": (values * rows.weights(make_rule())).sum().item(),
        "grad_logits": grad.tolist(),
    }


def tis(inputs: Case) -> dict[str, Any]:
    """Truncated importance sampling, IcePop, rejection masks, divergence metrics."""
    rows = Rows.of(inputs["response_mask"])
    old, behavior = rows.flat(inputs["old_log_prob"]), rows.flat(inputs["rollout_log_prob"])
    place = (old, behavior, rows.mask, rows.row_ids, rows.num_rows)
    objective = _correction(inputs)
    mean = mean_weight(objective.sampled, *place) if objective.needs_old_first else 1.0
    _, metrics = _token_loss(
        rows, objective, logprobs=old, old=old, behavior=behavior, advantages=torch.zeros_like(old), mean=mean
    )
    if "option" in inputs:
        return {"modified_mask": rows.matrix((rows.mask & (metrics["rejected_fraction"] == 0)).double())}
    if "threshold" in inputs:
        return {"weights": rows.matrix(metrics["importance_weight"])}
    by_row = row_divergence(*place)
    gap = by_row["log_perplexity_gap"]
    return {
        "kl": rows.mean(metrics["behavior_kl"]),
        "k3_kl": rows.mean(metrics["behavior_k3"]),
        "chi2_token": rows.mean(metrics["behavior_chi2"]),
        "training_ppl": by_row["proximal_perplexity"].mean().item(),
        "training_log_ppl": by_row["proximal_log_perplexity"].mean().item(),
        "rollout_ppl": by_row["behavior_perplexity"].mean().item(),
        "rollout_log_ppl": by_row["behavior_log_perplexity"].mean().item(),
        "log_ppl_diff": gap.mean().item(),
        "log_ppl_abs_diff": by_row["log_perplexity_gap_abs"].mean().item(),
        "log_ppl_diff_max": gap.max().item(),
        "log_ppl_diff_min": gap.min().item(),
        "ppl_ratio": by_row["perplexity_ratio"].mean().item(),
        "chi2_seq": by_row["sequence_chi2"].mean().item(),
    }


def _correction(inputs: Case) -> Rule:
    """Return the settings that a case of verl's means: ``upper`` or ``lower_upper``."""
    bounds = [min(float(bound), 1e300) for bound in str(inputs.get("threshold", "inf")).split("_")]
    upper, lower = bounds[-1], bounds[0] if len(bounds) > 1 else None
    if "option" in inputs:
        level, _, quantity = inputs["option"].rpartition("_")
        return make_rule(
            rejection=Rejection(quantity),
            rejection_level=RejectionLevel(level.replace("_", "-")),
            rejection_upper=upper,
            rejection_lower=lower,
        )
    return make_rule(
        importance=Importance.TIS if lower is None else Importance.ICEPOP,
        importance_cap=upper,
        importance_floor=lower or 0.0,
        importance_level=ImportanceLevel(inputs.get("level", "token")),
        importance_normalize=inputs.get("batch_normalize", False),
    )


def decoupled_ppo(inputs: Case) -> dict[str, Any]:
    """The decoupled objective, the approximated proximal policy, and the admission bound."""
    if "states" in inputs:
        return dict(in_memory(capacity)(inputs))
    if "versions" in inputs:
        return _approximations(inputs)
    rows = Rows.of(inputs["response_mask"])
    objective = with_settings(
        _selection(inputs["rejection_sampling"]),
        clip_low=inputs["eps_low"],
        clip_high=inputs["eps_high"],
        dual_clip=inputs["dual_clip_c"] or 0.0,
    )
    outputs, _, _ = _loss(
        inputs, rows, objective, rows.flat(inputs["prox_log_prob"]), rows.flat(inputs["behave_log_prob"])
    )
    return outputs


def _selection(selection: Case | None) -> Rule:
    """Return the settings of a selection of AReaL's. Its ratio of a row is the geometric mean, and
    its divergences are behaviour over proximal, the other way round."""
    if selection is None:
        return make_rule(importance=Importance.NONE)
    upper, lower, is_row = selection["upper"], selection["lower"], selection["level"] != "token"
    if selection["metric"] != "ratio":
        reversed_quantity = {"kl_k1": Rejection.RATIO, "kl_k2": Rejection.K2, "kl_k3": Rejection.K3_REVERSE}
        return make_rule(
            importance=Importance.DECOUPLED,
            rejection=reversed_quantity[selection["metric"]],
            rejection_level=RejectionLevel.MEAN if is_row else RejectionLevel.TOKEN,
            rejection_upper=upper,
            rejection_lower=lower,
        )
    if selection["action"] == "clamp" and lower:
        raise ValueError(f"clamp has lower {lower}; expected none: a weight is bounded from above alone")
    return make_rule(
        importance=Importance.TIS if selection["action"] == "clamp" else Importance.ICEPOP,
        importance_cap=upper,
        importance_floor=lower or 0.0,
        importance_level=ImportanceLevel.GEOMETRIC if is_row else ImportanceLevel.TOKEN,
    )


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
