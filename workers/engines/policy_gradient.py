"""What every training backend does between weights and optimiser: log-probs of samples, and the gradient of an objective.

*Consumes* a model and training samples. *Produces* log-probs, or gradients accumulated in the model's parameters with the
loss and metrics of the whole batch. *Waits for* nothing.

Loss weights are made from the whole batch before it is cut into micro-batches, so that the cut changes nothing but memory.
Sums stay on the device until the last micro-batch is done: one wait for the device a batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from pipeline.algorithms.loss import imitation_loss, token_loss
from pipeline.batching import PackedBatch, TrainingSample, pack, plan_micro_batches
from protocol.errors import EngineError
from workers.engines.packed import Entropy, PackedTokens, TokenScores, score_packed

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from pipeline.algorithms.objective import Objective


@dataclass(frozen=True, slots=True)
class ForwardSettings:
    """How samples go through the model."""

    temperature: float
    """Of sampling; log-probs are those of the sampler."""
    micro_batch_tokens: int
    """Prompt and response tokens of one forward; a longer sample is a forward of its own."""
    autocast: torch.dtype | None = None
    """Type to compute in where it is safe; the weights' own when absent."""


@dataclass(frozen=True, slots=True)
class BatchTotals:
    """Loss and metrics of a whole batch; the gradients are in the parameters."""

    loss: float
    metrics: dict[str, float]
    """Means over the loss mask, ``policy_ratio_max``, and with an imitation term ``nll``, the mean over its own mask."""
    num_tokens: int
    """Prompt and response tokens."""


def sample_logprobs(
    model: PreTrainedModel, samples: Sequence[TrainingSample], settings: ForwardSettings
) -> list[np.ndarray]:
    """Return float32 [response tokens] for each sample, in order, without gradients."""
    results: list[np.ndarray] = [np.empty(0, dtype=np.float32)] * len(samples)
    with torch.no_grad():
        for indices, batch in _micro_batches(samples, settings):
            scores = _score(model, batch, settings, Entropy.NONE)
            for index, values in zip(indices, batch.split(_to_numpy(scores.logprobs)), strict=True):
                results[index] = values
    return results


def accumulate_gradient(
    model: PreTrainedModel,
    samples: Sequence[TrainingSample],
    objective: Objective,
    settings: ForwardSettings,
    loss_scale: float = 1.0,
) -> BatchTotals:
    """Add the gradient of the whole batch's loss to the parameters' ``grad``.

    Args:
        model: A model that went through ``prepare_packed``.
        samples: One optimiser batch. With ``old_logprobs`` on none of them, the present policy is the proximal one, as it is
            in the only step of an update: its own log-probs stand in, without gradient, and one forward pass is spared.
        objective: The loss.
        settings: How samples go through the model.
        loss_scale: Factor of the gradient only: the number of ranks where a backend averages gradients over them.

    Raises:
        EngineError: Some samples have old log-probs and some have none.
    """
    with_old = sum(sample.old_logprobs is not None for sample in samples)
    if objective.needs_old and with_old not in (0, len(samples)):
        raise EngineError(
            f"{with_old} of {len(samples)} samples have old_logprobs; expected all of them or none: fill them in with "
            "response_logprobs before the first of several steps"
        )
    weights = objective.token_weights(samples)
    has_imitation = objective.imitation_coefficient > 0.0
    imitation = objective.imitation_weights(samples) if has_imitation else []
    entropy = Entropy.DIFFERENTIATE if objective.needs_entropy else Entropy.MEASURE
    sums: dict[str, torch.Tensor] = {}
    largest_ratio = torch.zeros((), device=model.device)
    for indices, batch in _micro_batches(samples, settings):
        scores = _score(model, batch, settings, entropy)
        losses, metrics = _token_loss(objective, batch, scores)
        weight = torch.from_numpy(np.concatenate([weights[index] for index in indices])).to(losses)
        loss = (losses * weight).sum()
        if has_imitation:
            nll = imitation_loss(scores.logprobs, torch.from_numpy(batch.nll_mask).to(losses.device))
            weight = torch.from_numpy(np.concatenate([imitation[index] for index in indices])).to(losses)
            loss = loss + (nll * weight).sum()
            metrics["nll"] = nll.detach()
        (loss * loss_scale).backward()
        for name, values in {**metrics, "loss": loss.detach()}.items():
            total = values.double().sum()
            sums[name] = sums[name] + total if name in sums else total
        largest_ratio = torch.maximum(largest_ratio, metrics["policy_ratio"].max().to(largest_ratio))
    num_loss_tokens = max(1, sum(int(np.count_nonzero(sample.loss_mask)) for sample in samples))
    totals = dict(zip(sums, torch.stack(list(sums.values())).tolist(), strict=True))
    loss = totals.pop("loss")
    counts = {"nll": max(1, sum(int(np.count_nonzero(mask)) for mask in imitation))}
    metrics = {name: total / counts.get(name, num_loss_tokens) for name, total in totals.items()}
    return BatchTotals(
        loss=loss,
        metrics=metrics | {"policy_ratio_max": largest_ratio.item()},
        num_tokens=sum(int(sample.tokens.size) for sample in samples),
    )


def _micro_batches(
    samples: Sequence[TrainingSample], settings: ForwardSettings
) -> Iterator[tuple[list[int], PackedBatch]]:
    for indices in plan_micro_batches([sample.tokens.size for sample in samples], settings.micro_batch_tokens):
        yield indices, pack([samples[index] for index in indices])


def _score(model: PreTrainedModel, batch: PackedBatch, settings: ForwardSettings, entropy: Entropy) -> TokenScores:
    device = model.device
    context: AbstractContextManager[object] = nullcontext()
    if settings.autocast is not None:
        context = torch.autocast(device.type, dtype=settings.autocast)
    with context:
        return score_packed(model, PackedTokens.from_batch(batch, device), settings.temperature, entropy)


def _token_loss(
    objective: Objective, batch: PackedBatch, scores: TokenScores
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    device = scores.logprobs.device

    def on_device(values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values).to(device)

    return token_loss(
        objective,
        logprobs=scores.logprobs,
        old_logprobs=scores.logprobs.detach() if batch.old_logprobs is None else on_device(batch.old_logprobs),
        behavior_logprobs=on_device(batch.behavior_logprobs),
        reference_logprobs=None if batch.reference_logprobs is None else on_device(batch.reference_logprobs),
        entropy=scores.entropy,
        advantages=on_device(batch.advantages),
        mask=on_device(batch.loss_mask),
        row_ids=on_device(batch.row_ids),
        num_rows=batch.num_rows,
        versions=on_device(batch.versions),
    )


def _to_numpy(values: torch.Tensor) -> np.ndarray:
    return values.to("cpu", torch.float32).numpy()
