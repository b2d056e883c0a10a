"""The computation that value engines share: values of tokens, and the gradient of their regression.

    G_t = gamma^(T - t) R                                              Monte-Carlo targets (lambda_critic = 1, the default)
    loss = 1/n sum_i 1/T_i sum_t max((V - G)^2, (clip(V, V_old - c_low, V_old + c_high) - G)^2) / 2

The sums run over the n finished responses of the whole batch (VAPO and T-PPO). T-PPO's port also
divides by unfinished rows, which shrinks the step when few responses finish; here there are only
finished ones. As with the policy, weights are computed from the whole batch before it is split into
micro-batches and among ranks."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from pipeline.algorithms.terms.advantage import terminal_rewards
from pipeline.algorithms.terms.clip import Bounds, clipped_value_loss
from pipeline.algorithms.terms.gae import explained_variance, lambda_targets
from pipeline.config.learning import ValueSection
from pipeline.process import work
from protocol.errors import EngineError
from workers.engines.model.loading import value_head
from workers.engines.model.optimizer import AppliedStep
from workers.engines.model.packed import Backward, PackedTokens, Plan, hidden_packed, share_of_plan
from workers.engines.scoring.seam import ScoringRequest
from workers.engines.value.seam import ValueSample, ValueStepResult

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class ValueSettings:
    micro_batch_tokens: int
    """Prompt and response tokens of one forward pass, shared ones once; a longer sequence gets one to itself."""
    gamma: float = 1.0
    gae_lambda: float = 1.0
    """For the targets; 1 is Monte-Carlo."""
    bounds: Bounds = field(default_factory=ValueSection)
    """How far a value counts as having moved from the stored one."""
    autocast: torch.dtype | None = None
    """Compute type where it is safe; None for the type of the weights."""


class PackedValue(torch.nn.Module):
    """A token classifier with one output, whose ``forward`` values packed tokens in one pass."""

    def __init__(self, model: PreTrainedModel, settings: ValueSettings) -> None:
        """``model`` went through ``prepare_packed``. Raises EngineError without a scalar head."""
        super().__init__()
        self.model = model
        # in a tuple, so that it is registered as the model's child only
        self._head = (value_head(model),)
        self._settings = settings

    def forward(self, batch: PackedTokens) -> torch.Tensor:
        """Return V before each scored token: [M] float32 (float64 for a float64 model)."""
        context: AbstractContextManager[object] = nullcontext()
        if self._settings.autocast is not None:
            context = torch.autocast(batch.tokens.device.type, dtype=self._settings.autocast)
        with context:
            hidden = hidden_packed(self.model, batch)
            # cloned, as FSDP2 cannot return views
            values = self._head[0](hidden.index_select(0, batch.positions)).squeeze(-1).clone()
        return values if values.dtype == torch.float64 else values.float()


@dataclass(frozen=True, slots=True)
class RegressionSums:
    """One rank's contribution to a batch's figures; zero for samples of other ranks."""

    loss: torch.Tensor
    clipped: torch.Tensor
    """Both are float64 scalars on the device; ``clipped`` is the weight of clipped tokens."""
    values: torch.Tensor
    """float64 [T] on the host: of every response token of the batch, in order."""


@torch.no_grad()
def compute_values(
    model: torch.nn.Module, requests: Sequence[ScoringRequest], plan: Plan, device: torch.device
) -> dict[int, np.ndarray]:
    """Return float32 [num_scored] for each request of ``plan``, by index: V before each token.

    Raises EngineError when no token precedes a request's tail."""
    results: dict[int, np.ndarray] = {}
    sizes = [int(request.tokens.size) for request in requests]
    for indices in plan:
        with work.part(share_of_plan(plan, indices, sizes)):
            chosen = indices or [_shortest(requests)]
            num_scored = [requests[index].num_scored for index in chosen]
            values = model(PackedTokens.of([requests[index].tokens for index in chosen], num_scored, device))
            tails = np.split(values.to("cpu", torch.float32).numpy(), np.cumsum(num_scored)[:-1])
            results |= zip(indices, tails, strict=False)
    return results


def check_value_samples(samples: Sequence[ValueSample]) -> None:
    if not samples:
        raise EngineError("a value step on 0 responses; expected at least 1; skip it")
    for sample in samples:
        length = sample.scored.size
        if not 1 <= sample.prompt_length < sample.tokens.size:
            raise EngineError(
                f"response {sample.name} has {sample.tokens.size} tokens, of which {sample.prompt_length} are prompt; "
                "expected at least 1 prompt and 1 response token"
            )
        if sample.old_values.shape != (length,):
            raise EngineError(
                f"response {sample.name} has old_values of shape {sample.old_values.shape}; expected ({length},), "
                f"one per response token"
            )


def accumulate_regression(
    model: torch.nn.Module,
    samples: Sequence[ValueSample],
    settings: ValueSettings,
    plan: Plan,
    device: torch.device,
    *,
    backward: Backward | None = None,
    loss_scale: float = 1.0,
) -> RegressionSums:
    """Add this plan's part of the whole batch's gradient to the parameters' ``grad``.

    ``plan``, ``backward`` and ``loss_scale`` are as in ``policy_gradient.accumulate_gradient``."""
    lengths = [sample.response_length for sample in samples]
    ends = np.cumsum(lengths)
    values = np.zeros(int(ends[-1]))
    loss = torch.zeros((), dtype=torch.float64, device=device)
    clipped = torch.zeros_like(loss)
    sizes = [int(sample.tokens.size) for sample in samples]
    for number, indices in enumerate(plan, start=1):
        with work.part(share_of_plan(plan, indices, sizes)):
            counts = float(bool(indices))
            chosen = indices or [_shortest(samples)]
            num_scored = [lengths[index] for index in chosen]
            places = [samples[index].scored for index in chosen]
            new = model(PackedTokens.at([samples[index].tokens for index in chosen], places, device))

            def like(arrays: Sequence[np.ndarray], new: torch.Tensor = new) -> torch.Tensor:
                return torch.from_numpy(np.concatenate(arrays)).to(new)

            token = clipped_value_loss(
                new,
                like([samples[index].old_values for index in chosen]),
                like([_targets(samples[index], settings, lam=settings.gae_lambda) for index in chosen]),
                settings.bounds,
            )
            weight = counts * like([response_weights(lengths[index], len(samples)) for index in chosen])
            part = (token.loss * weight).sum()
            loss += part.detach()
            clipped += (token.clipped * weight).sum()
            tails = np.split(new.detach().to("cpu", torch.float64).numpy(), np.cumsum(num_scored)[:-1])
            for index, tail in zip(indices, tails, strict=False):
                values[ends[index] - lengths[index] : ends[index]] = tail
            if backward is None:
                (part * loss_scale).backward()
            else:
                backward(part * loss_scale, loss if number == len(plan) else None)
    return RegressionSums(loss, clipped, torch.from_numpy(values))


def value_step_result(
    samples: Sequence[ValueSample], settings: ValueSettings, sums: RegressionSums, step: AppliedStep
) -> ValueStepResult:
    lengths = [sample.response_length for sample in samples]
    weights = np.concatenate([response_weights(length, len(samples)) for length in lengths])
    returns = np.concatenate([_targets(s, settings, lam=1.0) for s in samples])
    values = sums.values.numpy()
    return ValueStepResult(
        applied=step.applied,
        loss=float(sums.loss),
        explained_variance=explained_variance(values, returns, weights),
        clip_fraction=float(sums.clipped),
        value_mean=float(weights @ values),
        target_mean=float(weights @ returns),
        grad_norm=step.grad_norm,
        learning_rate=step.learning_rate,
        num_tokens=sum(int(sample.tokens.size) for sample in samples),
    )


def _targets(sample: ValueSample, settings: ValueSettings, *, lam: float) -> np.ndarray:
    rewards = terminal_rewards(sample.reward, sample.response_length)
    return lambda_targets(rewards, sample.old_values, gamma=settings.gamma, lam=lam)


def response_weights(length: int, num_samples: int) -> np.ndarray:
    """Return float64 [length]: each response weighs 1 / num_samples, spread evenly over its tokens."""
    return np.full(length, 1.0 / (length * num_samples))


def _shortest(sequences: Sequence[ScoringRequest] | Sequence[ValueSample]) -> int:
    return min(range(len(sequences)), key=lambda index: sequences[index].tokens.size)
