"""Adapter of the family about losses by guidance: torch, float64."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pipeline.algorithms.guidance import GuidanceSettings
from pipeline.algorithms.loss import token_loss
from pipeline.algorithms.objective import Importance, Objective, Surrogate
from pipeline.algorithms.terms.aggregation import Aggregation
from pipeline.algorithms.terms.guided import first_error_weights, published_weights, standard_weights
from pipeline.algorithms.terms.ratio import GuidedLogprobs
from tests.golden.adapters.batch import Rows, gradient

Case = Mapping[str, Any]


def nlft(inputs: Case) -> dict[str, Any]:
    """NLFT as published and its first-error form: weights, flags, losses, gradients."""
    settings = GuidanceSettings(**inputs.get("settings", {}))
    if "verdict" not in inputs:
        standard = torch.tensor(inputs["standard_prob"], dtype=torch.float64)
        return {"weights": standard_weights(standard.log(), settings).tolist()}
    rows = Rows.of(inputs["response_mask"])
    surrogate = Surrogate(inputs["surrogate"])
    verdicts = torch.tensor(inputs["verdict"], dtype=torch.float64)[rows.row_ids]
    logprobs = rows.flat(inputs["base_prob"]).log().requires_grad_()
    is_wrong = rows.mask & (verdicts < 0)
    standard, judge = (rows.flat(inputs[f"{name}_prob"]).log() for name in ("standard", "judge"))
    guided = GuidedLogprobs(standard, judge, rows.mask, is_wrong)
    objective = Objective(
        surrogate=surrogate,
        aggregation=Aggregation.SEQ_MEAN_TOKEN_MEAN,
        importance=Importance.NONE,
        guidance=settings,
    )
    losses, metrics = token_loss(
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
    if surrogate is Surrogate.NLFT:
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
