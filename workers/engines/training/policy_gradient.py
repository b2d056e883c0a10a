"""The computation that all training backends share: log-probs, and the gradient of a rule's loss.

Loss weights are computed from the whole batch before it is split, so neither micro-batches nor
sharing among ranks changes anything but memory. Sums stay on the device until the last micro-batch
is done: one device sync per batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from pipeline.algorithms.batching import ROW_METRICS, PackedBatch, TrainingSample, pack
from pipeline.algorithms.loss import imitation_loss, policy_loss
from pipeline.algorithms.terms.guided import GuidedLogprobs
from pipeline.algorithms.terms.importance import mean_weight
from pipeline.algorithms.terms.kl import row_divergence
from pipeline.process import work
from protocol.errors import EngineError
from workers.engines.model.head import HEAD_BYTES, Entropy
from workers.engines.model.packed import (
    Backward,
    PackedTokens,
    PartLoss,
    Plan,
    TokenScores,
    hidden_packed,
    loss_packed,
    score_packed,
    share_of_plan,
)
from workers.engines.model.trial import trial_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from pipeline.algorithms.base import Rule


@dataclass(frozen=True, slots=True)
class ForwardSettings:
    temperature: float
    """Sampling temperature; log-probs are the sampler's."""
    micro_batch_tokens: int
    """Prompt and response tokens per forward pass, shared ones once; a longer sample gets a pass to itself."""
    autocast: torch.dtype | None = None
    """Compute type where it is safe; None for the type of the weights."""
    head_bytes: int = HEAD_BYTES
    """Most memory of logits, and of the numbers derived from them."""


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


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """A loss of scored tokens, and what it needs to know about them."""

    of_part: PartLoss
    row_ids: np.ndarray
    """int64 [M]: the sample of each scored token, ascending."""
    keep_rows: bool
    """Whether it needs all tokens of a sample at once."""
    entropy: Entropy = Entropy.NONE
    keep_states: bool = False


class PackedPolicy(torch.nn.Module):
    """A language model whose ``forward`` scores packed tokens."""

    def __init__(self, model: PreTrainedModel, settings: ForwardSettings) -> None:
        super().__init__()
        self.model = model
        self._settings = settings

    def forward(self, batch: PackedTokens, loss: PolicyLoss | None = None) -> torch.Tensor:
        """Return the log-probs [M] of the scored tokens, or with ``loss`` its sum over them."""
        settings = self._settings
        with self._context(batch):
            if loss is None:
                return score_packed(self.model, batch, settings.temperature, head_bytes=settings.head_bytes).logprobs
            return loss_packed(
                self.model,
                batch,
                loss.of_part,
                settings.temperature,
                loss.entropy,
                settings.head_bytes,
                row_ids=loss.row_ids,
                keep_rows=loss.keep_rows,
                keep_states=loss.keep_states,
            )

    def states(self, batch: PackedTokens) -> torch.Tensor:
        """Return the last hidden states [N, hidden]."""
        with self._context(batch):
            return hidden_packed(self.model, batch)

    def _context(self, batch: PackedTokens) -> AbstractContextManager[object]:
        dtype = self._settings.autocast
        return nullcontext() if dtype is None else torch.autocast(batch.tokens.device.type, dtype=dtype)


def trial_numbers(policy: PackedPolicy, model: PreTrainedModel) -> torch.Tensor:
    """Make a pass of a few tokens as an update does, and one as log-probs are computed, and return
    log-probs, loss, and the norm and sum of each gradient, which are then dropped."""
    sequences = trial_tokens(model)
    num_scored = [tokens.size - 1 for tokens in sequences]
    batch = PackedTokens.of(sequences, num_scored, model.device)
    with torch.no_grad():
        logprobs = policy(batch)
    row_ids = np.repeat(np.arange(len(sequences)), num_scored)
    loss = policy(batch, PolicyLoss(lambda scores, _: scores.logprobs.sum(), row_ids, False, Entropy.MEASURE))
    loss.backward()
    numbers = [logprobs, loss.detach()[None].to(logprobs)]
    for parameter in model.parameters():
        if parameter.grad is not None:
            numbers.append(torch.stack([parameter.grad.norm(), parameter.grad.sum()]).to(logprobs))
            parameter.grad = None
    return torch.cat(numbers)


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
            logprobs = policy(PackedTokens.from_batch(batch, device))
        results |= zip(indices, batch.split(logprobs.to("cpu", torch.float32).numpy()), strict=False)
    return results


def check_samples(samples: Sequence[TrainingSample], rule: Rule) -> None:
    """Raise EngineError if there are no samples, or only some have old log-probs."""
    if not samples:
        raise EngineError("an optimiser step on 0 samples; expected at least 1; skip it")
    with_old = sum(sample.old_logprobs is not None for sample in samples)
    allowed = (len(samples),) if rule.needs_old_first else (0, len(samples))
    if rule.needs_old and with_old not in allowed:
        raise EngineError(
            f"{with_old} of {len(samples)} samples have old_logprobs; expected all of them, or none if weights are not "
            "normalised over the batch: fill them in with response_logprobs before the first of several steps"
        )


def accumulate_gradient(
    policy: torch.nn.Module,
    samples: Sequence[TrainingSample],
    rule: Rule,
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

    ``plan`` is the whole batch's micro-batches, or one rank's share. ``backward`` replaces
    ``loss.backward()``. ``loss_scale`` multiplies only the gradient: the number of ranks where a
    backend averages over them."""
    batch = BatchLoss(samples, rule, device)
    lengths = [int(sample.tokens.size) for sample in samples]
    for number, indices in enumerate(plan, start=1):
        with work.part(share_of_plan(plan, indices, lengths)):
            micro = batch.micro_batch(indices)
            loss = policy(micro.tokens, micro.loss)
            micro.count(loss)
            if backward is None:
                (loss * loss_scale).backward()
            else:
                backward(loss * loss_scale, batch.sums["loss"] if number == len(plan) else None)
    return BatchSums(batch.sums, batch.largest)


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """What a forward pass takes, and what is to be done with the loss that it returns."""

    tokens: PackedTokens
    loss: PolicyLoss
    count: Callable[[torch.Tensor], None]
    """Adds loss and metrics to the sums of the batch; called after the pass."""


class BatchLoss:
    """The loss of a whole batch, a micro-batch at a time. Its weights are those of the whole batch."""

    def __init__(self, samples: Sequence[TrainingSample], rule: Rule, device: torch.device) -> None:
        self._samples, self._rule, self._device = samples, rule, device
        self._weights = rule.token_weights(samples)
        has_imitation = rule.settings.positive_nll_coefficient > 0.0
        self._imitation = rule.imitation_weights(samples) if has_imitation else None
        self._entropy = Entropy.DIFFERENTIATE if rule.needs_entropy else Entropy.MEASURE
        self._mean = _mean_weight(rule, samples)
        self.sums: dict[str, torch.Tensor] = {}
        """As in :class:`BatchSums`, over the micro-batches counted so far."""
        self.largest = torch.full((3,), -torch.inf, dtype=torch.float64, device=device)

    def micro_batch(self, indices: Sequence[int]) -> MicroBatch:
        """Pack the samples of these indices; without any, a pass that counts for nothing."""
        rule, batch, weight = self._rule, _pack(self._samples, indices), float(bool(indices))
        chosen = indices or [_shortest(self._samples)]
        losses = _MicroBatchLoss(
            rule,
            batch,
            self._device,
            self._mean,
            weight * np.concatenate([self._weights[index] for index in chosen]),
            None if self._imitation is None else weight * np.concatenate([self._imitation[i] for i in chosen]),
        )
        return MicroBatch(
            PackedTokens.from_batch(batch, self._device),
            PolicyLoss(losses.of_part, batch.row_ids, rule.reads_rows, self._entropy, rule.needs_states),
            partial(self._count, batch, losses, weight),
        )

    def _count(self, batch: PackedBatch, losses: _MicroBatchLoss, weight: float, loss: torch.Tensor) -> None:
        metrics = losses.metrics()
        rows = _row_metrics(batch, metrics)
        for name, values in {**metrics, **rows, "loss": loss.detach()}.items():
            total = weight * values.double().sum()
            self.sums[name] = self.sums[name] + total if name in self.sums else total
        if weight:
            gap, nowhere = rows["log_perplexity_gap"], ~_has_loss(batch, self._device)
            both = (gap.masked_fill(nowhere, -torch.inf), (-gap).masked_fill(nowhere, -torch.inf))
            found = torch.stack([metrics["policy_ratio"].max(), both[0].max(), both[1].max()])
            self.largest = torch.maximum(self.largest, found.double())


def batch_totals(samples: Sequence[TrainingSample], rule: Rule, sums: BatchSums) -> BatchTotals:
    """Turn the sums over all ranks into loss and metrics; waits for the device."""
    counted = [int(np.count_nonzero(sample.loss_mask)) for sample in samples]
    num_loss_tokens = max(1, sum(counted))
    *values, ratio, gap, negative_gap = torch.cat([torch.stack([*sums.sums.values()]), sums.largest]).tolist()
    totals = dict(zip(sums.sums, values, strict=True))
    loss = totals.pop("loss")
    counts: dict[str, int] = dict.fromkeys(ROW_METRICS, max(1, sum(map(bool, counted))))
    if "nll" in totals:
        counts["nll"] = max(1, sum(int(np.count_nonzero(mask)) for mask in rule.imitation_weights(samples)))
    metrics = {name: total / counts.get(name, num_loss_tokens) for name, total in totals.items()}
    if any(counted):
        metrics |= {"policy_ratio_max": ratio, "log_perplexity_gap_max": gap, "log_perplexity_gap_min": -negative_gap}
    return BatchTotals(loss, metrics, num_tokens=sum(int(sample.tokens.size) for sample in samples))


def _pack(samples: Sequence[TrainingSample], indices: Sequence[int]) -> PackedBatch:
    """Pack a micro-batch; an empty one gets the shortest sample, so that every rank has an input."""
    return pack([samples[index] for index in indices or [_shortest(samples)]])


def _shortest(samples: Sequence[TrainingSample]) -> int:
    return min(range(len(samples)), key=lambda index: samples[index].tokens.size)


class _MicroBatchLoss:
    """The loss of a micro-batch's scored tokens, part by part, and the metrics of each token."""

    def __init__(
        self,
        rule: Rule,
        batch: PackedBatch,
        device: torch.device,
        mean: float,
        weights: np.ndarray,
        imitation: np.ndarray | None,
    ) -> None:
        """``weights`` and ``imitation`` are factors of the token losses [M], ``imitation`` None
        without that term. ``mean`` divides importance weights."""
        self._rule, self._mean = rule, mean
        self._row_ids = batch.row_ids
        columns = {
            "weights": weights,
            "imitation": imitation,
            "nll_mask": batch.nll_mask,
            "old": batch.old_logprobs,
            "behavior": batch.behavior_logprobs,
            "reference": batch.reference_logprobs,
            "advantages": batch.advantages,
            "mask": batch.loss_mask,
            "row_ids": batch.row_ids,
            "versions": batch.versions,
            "standard": batch.standard_logprobs,
            "judge": batch.judge_logprobs,
            "has_standard": batch.has_standard,
            "has_judge": batch.has_judge,
        }
        self._columns = {name: torch.from_numpy(v).to(device) for name, v in columns.items() if v is not None}
        self._found: list[dict[str, torch.Tensor]] = []

    def metrics(self) -> dict[str, torch.Tensor]:
        """Return the metrics of each token [M], over all parts so far."""
        return {name: torch.cat([found[name] for found in self._found]) for name in self._found[0]}

    def of_part(self, scores: TokenScores, part: slice) -> torch.Tensor:
        column = {name: values[part] for name, values in self._columns.items()}
        first, last = int(self._row_ids[part.start]), int(self._row_ids[part.stop - 1])
        guided = None
        if "standard" in column:
            of_passes = (column[name] for name in ("standard", "judge", "has_standard", "has_judge"))
            guided = GuidedLogprobs(*of_passes, states=scores.states)
        losses, metrics = policy_loss(
            self._rule,
            logprobs=scores.logprobs,
            old_logprobs=column.get("old", scores.logprobs.detach()),
            behavior_logprobs=column["behavior"],
            reference_logprobs=column.get("reference"),
            entropy=scores.entropy,
            advantages=column["advantages"],
            mask=column["mask"],
            row_ids=column["row_ids"] - first,
            num_rows=last - first + 1,
            versions=column["versions"],
            mean_weight=self._mean,
            guided=guided,
        )
        loss = (losses * column["weights"].to(losses)).sum()
        if "imitation" in column:
            nll = imitation_loss(scores.logprobs, column["nll_mask"])
            loss = loss + (nll * column["imitation"].to(losses)).sum()
            metrics["nll"] = nll.detach()
        self._found.append(metrics)
        return loss


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


def _mean_weight(rule: Rule, samples: Sequence[TrainingSample]) -> float:
    """Return the divisor of importance weights over the whole batch, which every rank has."""
    if not rule.needs_old_first:
        return 1.0
    batch = pack(samples)
    assert batch.old_logprobs is not None, "check_samples ensures it"
    return mean_weight(
        rule.sampled,
        torch.from_numpy(batch.old_logprobs).double(),
        torch.from_numpy(batch.behavior_logprobs).double(),
        torch.from_numpy(batch.loss_mask),
        torch.from_numpy(batch.row_ids),
        batch.num_rows,
    )
