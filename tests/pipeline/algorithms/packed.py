"""Random packed batches for tests: ragged rows, float64, some tokens and sometimes whole rows
without loss."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from hypothesis import settings
from torch import Tensor

from pipeline.algorithms.base import Rule
from pipeline.algorithms.batching import TrainingSample, pack
from pipeline.algorithms.loss import policy_loss
from pipeline.algorithms.terms.guided import GuidedLogprobs

few = settings(max_examples=8, deadline=None)
"""For claims that run a whole loss: each example costs some milliseconds under shape checks."""
some = settings(max_examples=40, deadline=None)


@dataclass(frozen=True, slots=True)
class Policy:
    """Stands for a model: every token of every sample has a parameter of its own, its log-prob."""

    logprobs: dict[str, Tensor]

    @classmethod
    def near(cls, samples: list[TrainingSample], seed: int, spread: float = 0.3) -> Policy:
        """Make log-probs near the old ones of ``samples``."""
        draw = np.random.default_rng(seed)
        return cls(
            {
                s.name: torch.from_numpy(s.old_logprobs + spread * draw.normal(size=s.response_length)).requires_grad_()
                for s in samples
                if s.old_logprobs is not None
            }
        )


def random_samples(seed: int, num: int = 7, *, max_length: int = 9) -> list[TrainingSample]:
    """Make ``num`` samples of 1 to ``max_length`` response tokens; the last carries
    no loss at all."""
    draw = np.random.default_rng(seed)
    samples: list[TrainingSample] = []
    for index in range(num):
        prompt, length = int(draw.integers(1, 5)), int(draw.integers(1, max_length + 1))
        old = -draw.exponential(size=length)
        samples.append(
            TrainingSample(
                name=f"t.0.{index}",
                tokens=draw.integers(0, 50, prompt + length).astype(np.int32),
                prompt_length=prompt,
                loss_mask=(draw.random(length) < 0.8) & (index < num - 1),
                advantages=np.full(length, draw.normal()),
                behavior_logprobs=old + 0.3 * draw.normal(size=length),
                versions=np.zeros(length, dtype=np.int32),
                reference_logprobs=old + 0.3 * draw.normal(size=length),
                old_logprobs=old,
            )
        )
    return samples


def guided_samples(seed: int, num: int = 9) -> list[TrainingSample]:
    """Make samples of each kind in turn: right, wrong with a judgment, right and wrong without
    guidance. Their advantages are the verdicts."""
    draw = np.random.default_rng(seed)
    samples: list[TrainingSample] = []
    for index, sample in enumerate(random_samples(seed, num, max_length=24)):
        is_right, is_guided = index % 2 == 0, index % 4 < 2
        columns = -draw.exponential(scale=(0.3, 1.0), size=(sample.response_length, 2)).T
        samples.append(
            replace(
                sample,
                advantages=np.full(sample.response_length, 1.0 if is_right else -1.0),
                standard_logprobs=columns[1] if is_guided else None,
                judge_logprobs=columns[0] if is_guided and not is_right else None,
            )
        )
    return samples


def guided_tokens(samples: list[TrainingSample]) -> GuidedLogprobs | None:
    """Lay the guided columns of samples end to end, float64; None where none has any."""
    batch = pack(samples)
    if batch.has_standard is None or batch.has_judge is None:
        return None
    nothing = [np.zeros(sample.response_length) for sample in samples]
    standard = [
        n if s.standard_logprobs is None else s.standard_logprobs for s, n in zip(samples, nothing, strict=True)
    ]
    judge = [n if s.judge_logprobs is None else s.judge_logprobs for s, n in zip(samples, nothing, strict=True)]
    columns = (np.concatenate(standard), np.concatenate(judge), batch.has_standard, batch.has_judge)
    return GuidedLogprobs(*map(torch.from_numpy, columns))


def token_losses(objective: Rule, samples: list[TrainingSample], policy: Policy) -> tuple[Tensor, dict[str, Tensor]]:
    """Run the objective on samples laid end to end, in float64 throughout."""

    def join(name: str) -> Tensor:
        return torch.from_numpy(np.concatenate([getattr(sample, name) for sample in samples]))

    lengths = torch.tensor([sample.response_length for sample in samples])
    logprobs = torch.cat([policy.logprobs[sample.name] for sample in samples])
    return policy_loss(
        objective,
        logprobs=logprobs,
        old_logprobs=join("old_logprobs"),
        behavior_logprobs=join("behavior_logprobs"),
        reference_logprobs=join("reference_logprobs"),
        entropy=-logprobs,
        advantages=join("advantages"),
        mask=join("loss_mask"),
        row_ids=torch.arange(len(samples)).repeat_interleave(lengths),
        num_rows=len(samples),
        guided=guided_tokens(samples),
    )


def train(
    objective: Rule, samples: list[TrainingSample], policy: Policy, plan: list[list[int]]
) -> tuple[float, dict[str, Tensor]]:
    """Return loss and gradient by sample when ``samples`` are one optimiser batch, cut into
    micro-batches by ``plan``."""
    weights = objective.token_weights(samples)
    total = torch.zeros((), dtype=torch.float64)
    for indices in plan:
        losses, _ = token_losses(objective, [samples[i] for i in indices], policy)
        total = total + (losses * torch.from_numpy(np.concatenate([weights[i] for i in indices]))).sum()
    names = [sample.name for sample in samples]
    gradients = torch.autograd.grad(total, [policy.logprobs[name] for name in names])
    return total.item(), dict(zip(names, gradients, strict=True))


def without_loss(sample: TrainingSample) -> TrainingSample:
    """Return the sample with nothing in its mask."""
    return replace(sample, loss_mask=np.zeros(sample.response_length, dtype=np.bool_))
