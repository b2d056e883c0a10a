"""Adapter of the family about losses by guidance: torch, float64."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pipeline.algorithms.loss import policy_loss
from pipeline.algorithms.nlft import Nlft, NlftFirst
from pipeline.algorithms.terms.guided import GuidedLogprobs, first_error_weights, published_weights, standard_weights
from pipeline.config.learning import Aggregation, Importance
from pipeline.config.rewards import GuidanceSection
from tests.golden.adapters.batch import Rows, gradient
from tests.rules import make_rule

Case = Mapping[str, Any]


def nlft(inputs: Case) -> dict[str, Any]:
    """NLFT as published and its first-error form: weights, flags, losses, gradients."""
    settings = GuidanceSection(**inputs.get("settings", {}))
    if "verdict" not in inputs:
        standard = torch.tensor(inputs["standard_prob"], dtype=torch.float64)
        return {"weights": standard_weights(standard.log(), settings).tolist()}
    rows = Rows.of(inputs["response_mask"])
    kind = {"nlft": Nlft, "nlft-first": NlftFirst}[inputs["surrogate"]]
    verdicts = torch.tensor(inputs["verdict"], dtype=torch.float64)[rows.row_ids]
    logprobs = rows.flat(inputs["base_prob"]).log().requires_grad_()
    is_wrong = rows.mask & (verdicts < 0)
    standard, judge = (rows.flat(inputs[f"{name}_prob"]).log() for name in ("standard", "judge"))
    guided = GuidedLogprobs(standard, judge, rows.mask, is_wrong)
    objective = make_rule(
        kind,
        loss_aggregation=Aggregation.SEQ_MEAN_TOKEN_MEAN,
        importance=Importance.NONE,
        constants=inputs.get("settings", {}),
    )
    losses, metrics = policy_loss(
        objective,
        logprobs=logprobs,
        old_logprobs=logprobs.detach(),
        behavior_logprobs=logprobs.detach(),
        reference_logprobs=None,
        entropy=None,
        advantages=verdicts,
        mask=rows.mask,
        row_ids=rows.row_ids,
        num_rows=rows.num_rows,
        guided=guided,
    )
    loss = (losses * rows.weights(objective)).sum()
    (grad,) = gradient(loss, logprobs)
    place = (is_wrong, rows.row_ids, rows.num_rows, settings)
    if kind is Nlft:
        _, weights = published_weights(logprobs.detach(), guided, *place)
    else:
        _, weights = first_error_weights(guided, *place)
    right = standard_weights(standard, settings)
    return {
        "loss": loss.item(),
        "grad_log_prob": rows.matrix(grad),
        "per_token_loss": rows.matrix(losses),
        "flags": _flags(rows, metrics["flagged_fraction"]),
        "weights": rows.matrix(torch.where(verdicts > 0, right, weights)),
    }


def _flags(rows: Rows, values: Tensor) -> list[list[int]]:
    return [[int(value) for value in row] for row in rows.matrix(values)]
