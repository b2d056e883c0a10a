"""The computation that all training backends share: log-probs, and the gradient of an objective.

Loss weights are computed from the whole batch before it is split, so neither micro-batches nor
sharing among ranks changes anything but memory. Sums stay on the device until the last micro-batch
is done: one device sync per batch."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from pipeline.algorithms.batching import ROW_METRICS, PackedBatch, TrainingSample, pack
from pipeline.algorithms.divergence import row_divergence
from pipeline.algorithms.importance import mean_weight
from pipeline.algorithms.loss import imitation_loss, token_loss
from pipeline.algorithms.surrogate import GuidedLogprobs
from pipeline.process import work
from protocol.errors import EngineError
from workers.engines.model.packed import Backward, Entropy, PackedTokens, Plan, TokenScores, score_packed, share_of_plan

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from pipeline.algorithms.objective import Objective


@dataclass(frozen=True, slots=True)
class ForwardSettings:
    """How samples are passed through the model."""

    temperature: float
    """Sampling temperature; log-probs are the sampler's."""
    micro_batch_tokens: int
    """Prompt and response tokens per forward pass; a longer sample gets a pass to itself."""
    autocast: torch.dtype | None = None
    """Compute type where it is safe; None for the type of the weights."""


@dataclass(frozen=True, slots=True)
class BatchTotals:
    """Loss and metrics of a whole batch; the gradients are in the parameters."""

    loss: float
    metrics: dict[str, float]
    """Means over the loss mask, or over samples with loss (``divergence.row_divergence``); maxima
    and minima; and with an imitation term ``nll``, the mean over the imitation mask."""
    num_tokens: int


@dataclass(frozen=True, slots=True)
class BatchSums:
    """One rank's contribution to loss and metrics: float64 scalars on the device."""

    sums: dict[str, torch.Tensor]
    """``loss``, and each metric summed over tokens or samples; the same names on every rank."""
    largest: torch.Tensor
    """[3]: maxima of the policy ratio, of the log-perplexity gap and of its negative."""


class PackedPolicy(torch.nn.Module):
    """A language model whose ``forward`` scores packed tokens, so that module wrappers see one
    call."""

    def __init__(self, model: PreTrainedModel, settings: ForwardSettings) -> None:
        super().__init__()
        self.model = model
        self._settings = settings

    def forward(
        self, batch: PackedTokens, entropy: Entropy, keep_states: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Return log-probs [M], entropies [M] or None, and hidden states [M, hidden] or None of the
        scored tokens."""
        context: AbstractContextManager[object] = nullcontext()
        if self._settings.autocast is not None:
            context = torch.autocast(batch.tokens.device.type, dtype=self._settings.autocast)
        with context:
            scores = score_packed(self.model, batch, self._settings.temperature, entropy, keep_states=keep_states)
        return scores.logprobs, scores.entropy, scores.states


@torch.no_grad()
def sample_logprobs(
    policy: torch.nn.Module, samples: Sequence[TrainingSample], plan: Plan, device: torch.device
) -> dict[int, np.ndarray]:
    """Return float32 [response tokens] for each sample of ``plan``, by index, without gradients."""
    results: dict[int, np.ndarray] = {}
    lengths = [int(sample.tokens.size) for sample in samples]
    for indices in plan:
        with work.part(share_of_plan(plan, indices, lengths)):
            batch = _pack(samples, indices)
            logprobs, *_ = policy(PackedTokens.from_batch(batch, device), Entropy.NONE)
        results |= zip(indices, batch.split(logprobs.to("cpu", torch.float32).numpy()), strict=False)
    return results


def check_samples(samples: Sequence[TrainingSample], objective: Objective) -> None:
    """Raise EngineError if there are no samples, or only some have old log-probs."""
    if not samples:
        raise EngineError("an optimiser step on 0 samples; expected at least 1; skip it")
    with_old = sum(sample.old_logprobs is not None for sample in samples)
    allowed = (len(samples),) if objective.needs_old_first else (0, len(samples))
    if objective.needs_old and with_old not in allowed:
        raise EngineError(
            f"{with_old} of {len(samples)} samples have old_logprobs; expected all of them, or none if weights are not "
            "normalised over the batch: fill them in with response_logprobs before the first of several steps"
        )


def accumulate_gradient(
    policy: torch.nn.Module,
    samples: Sequence[TrainingSample],
    objective: Objective,
    plan: Plan,
    device: torch.device,
    *,
    backward: Backward | None = None,
    loss_scale: float = 1.0,
) -> BatchSums:
    """Add this plan's part of the whole batch's gradient to the parameters' ``grad``.

    Old log-probs are on all ``samples`` or none (:func:`check_samples`). Without them the current
    policy is the proximal one, as in the only step of an update: its own log-probs are used,
    detached, which saves a forward pass.

    Args:
        policy: scores packed tokens.
        samples: the whole batch.
        objective: the loss.
        plan: the whole batch's micro-batches, or one rank's share of them.
        device: where to compute.
        backward: replaces ``loss.backward()``.
        loss_scale: multiplies only the gradient; the number of ranks where a backend averages gradients over them."""
    weights = objective.token_weights(samples)
    has_imitation = objective.imitation_coefficient > 0.0
    imitation = objective.imitation_weights(samples) if has_imitation else []
    entropy = Entropy.DIFFERENTIATE if objective.needs_entropy else Entropy.MEASURE
    sums: dict[str, torch.Tensor] = {}
    largest = torch.full((3,), -torch.inf, dtype=torch.float64, device=device)
    mean = _mean_weight(objective, samples)
    lengths = [int(sample.tokens.size) for sample in samples]
    for number, indices in enumerate(plan, start=1):
        with work.part(share_of_plan(plan, indices, lengths)):
            batch = _pack(samples, indices)
            scores = TokenScores(*policy(PackedTokens.from_batch(batch, device), entropy, objective.needs_states))
            losses, metrics = _token_loss(objective, batch, scores, mean)
            rows = _row_metrics(batch, metrics)
            counts = float(bool(indices))
            chosen = indices or [_shortest(samples)]
            weight = counts * torch.from_numpy(np.concatenate([weights[index] for index in chosen])).to(losses)
            loss = (losses * weight).sum()
            if has_imitation:
                nll = imitation_loss(scores.logprobs, torch.from_numpy(batch.nll_mask).to(losses.device))
                weight = counts * torch.from_numpy(np.concatenate([imitation[index] for index in chosen])).to(losses)
                loss = loss + (nll * weight).sum()
                metrics["nll"] = nll.detach()
            for name, values in {**metrics, **rows, "loss": loss.detach()}.items():
                total = counts * values.double().sum()
                sums[name] = sums[name] + total if name in sums else total
            if indices:
                gap, nowhere = rows["log_perplexity_gap"], ~_has_loss(batch, device)
                both = (gap.masked_fill(nowhere, -torch.inf), (-gap).masked_fill(nowhere, -torch.inf))
                found = torch.stack([metrics["policy_ratio"].max(), both[0].max(), both[1].max()])
                largest = torch.maximum(largest, found.double())
            if backward is None:
                (loss * loss_scale).backward()
            else:
                backward(loss * loss_scale, sums["loss"] if number == len(plan) else None)
    return BatchSums(sums, largest)


def batch_totals(samples: Sequence[TrainingSample], objective: Objective, sums: BatchSums) -> BatchTotals:
    """Turn the sums over all ranks into loss and metrics; waits for the device."""
    counted = [int(np.count_nonzero(sample.loss_mask)) for sample in samples]
    num_loss_tokens = max(1, sum(counted))
    *values, ratio, gap, negative_gap = torch.cat([torch.stack([*sums.sums.values()]), sums.largest]).tolist()
    totals = dict(zip(sums.sums, values, strict=True))
    loss = totals.pop("loss")
    counts: dict[str, int] = dict.fromkeys(ROW_METRICS, max(1, sum(map(bool, counted))))
    if "nll" in totals:
        counts["nll"] = max(1, sum(int(np.count_nonzero(mask)) for mask in objective.imitation_weights(samples)))
    metrics = {name: total / counts.get(name, num_loss_tokens) for name, total in totals.items()}
    if any(counted):
        metrics |= {"policy_ratio_max": ratio, "log_perplexity_gap_max": gap, "log_perplexity_gap_min": -negative_gap}
    return BatchTotals(loss, metrics, num_tokens=sum(int(sample.tokens.size) for sample in samples))


def _pack(samples: Sequence[TrainingSample], indices: Sequence[int]) -> PackedBatch:
    """Pack a micro-batch; an empty one is given the shortest sample, so that every rank has an
    input."""
    return pack([samples[index] for index in indices or [_shortest(samples)]])


def _shortest(samples: Sequence[TrainingSample]) -> int:
    return min(range(len(samples)), key=lambda index: samples[index].tokens.size)


def _token_loss(
    objective: Objective, batch: PackedBatch, scores: TokenScores, mean: float
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    device = scores.logprobs.device

    def on_device(values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values).to(device)

    guided = None
    if batch.standard_logprobs is not None:
        columns = (batch.standard_logprobs, batch.judge_logprobs, batch.has_standard, batch.has_judge)
        guided = GuidedLogprobs(*(on_device(column) for column in columns if column is not None), states=scores.states)
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
        mean_weight=mean,
        guided=guided,
    )


def _row_metrics(batch: PackedBatch, metrics: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the metrics of rows with loss; 0 for other rows, whose perplexity would be 1."""
    device = metrics["behavior_logprob"].device
    found = row_divergence(
        metrics["proximal_logprob"],
        metrics["behavior_logprob"],
        torch.from_numpy(batch.loss_mask).to(device),
        torch.from_numpy(batch.row_ids).to(device),
        batch.num_rows,
    )
    nowhere = ~_has_loss(batch, device)
    return {name: values.masked_fill(nowhere, 0.0) for name, values in found.items()}


def _has_loss(batch: PackedBatch, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.bincount(batch.row_ids, batch.loss_mask, batch.num_rows) > 0).to(device)


def _mean_weight(objective: Objective, samples: Sequence[TrainingSample]) -> float:
    """Return the divisor of importance weights over the whole batch, which every rank has."""
    if not objective.needs_old_first:
        return 1.0
    batch = pack(samples)
    assert batch.old_logprobs is not None, "check_samples ensures it"
    return mean_weight(
        objective,
        torch.from_numpy(batch.old_logprobs).double(),
        torch.from_numpy(batch.behavior_logprobs).double(),
        torch.from_numpy(batch.loss_mask),
        torch.from_numpy(batch.row_ids),
        batch.num_rows,
    )
