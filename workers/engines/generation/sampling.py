"""Token sampling from random streams that belong to the trajectory, not to the sampling process.

From logits ``[rows, vocabulary]`` and one uniform number per row come tokens, and their log-probs
under the distribution that was sampled from.

The uniform is that of the trajectory's stream at the response position
(``workers.engines.model.rng``). The token is the inverse of the cumulative distribution there,
summed in float64 in the order of the vocabulary. Kernels that differ in the last bit of a logit
move a boundary by about 1e-7. A token changes only if the uniform falls within that distance of a
boundary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from workers.engines.generation.seam import SamplingParams


@dataclass(frozen=True, slots=True)
class Distributions:
    """How a batch's rows of logits become distributions; made once, used for many steps."""

    divisor: torch.Tensor | None
    """float32 [rows, 1]: temperatures, 1 for greedy rows; None when all are 1."""
    greedy: torch.Tensor | None
    """bool [rows]; None when no row is greedy."""
    top_k: torch.Tensor | None
    """int64 [rows, 1], the vocabulary size where it is off; None when no row restricts any."""
    top_p: torch.Tensor | None
    """float32 [rows, 1]; present when ``top_k`` is."""

    @classmethod
    def of(cls, params: Sequence[SamplingParams], vocabulary: int, device: torch.device) -> Distributions:
        """Gather the parameters of a batch's rows."""
        temperatures = [p.temperature or 1.0 for p in params]
        greedy = [p.temperature == 0.0 for p in params]
        restricted = any((0 < p.top_k < vocabulary or p.top_p < 1.0) and p.temperature > 0.0 for p in params)
        top_k = [p.top_k if p.top_k > 0 and p.temperature > 0.0 else vocabulary for p in params]
        top_p = [p.top_p if p.temperature > 0.0 else 1.0 for p in params]

        def column(values: Sequence[float], dtype: torch.dtype) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype, device=device).unsqueeze(1)

        return cls(
            divisor=column(temperatures, torch.float32) if any(t != 1.0 for t in temperatures) else None,
            greedy=torch.tensor(greedy, device=device) if any(greedy) else None,
            top_k=column(top_k, torch.int64) if restricted else None,
            top_p=column(top_p, torch.float32) if restricted else None,
        )


def sample(
    logits: torch.Tensor, distributions: Distributions, uniform: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample from logits [rows, vocabulary]: int64 [rows] tokens and float32 [rows] log-probs.

    Temperature first, then top-k, then top-p of what is left, renormalised. A greedy row takes the
    first of its largest logits; its log-prob is that of the temperature-1 distribution.
    ``uniform`` is float64 [rows] in (0, 1)."""
    scores = logits.float()
    if distributions.divisor is not None:
        scores = scores / distributions.divisor
    if distributions.top_k is not None and distributions.top_p is not None:
        scores = scores.masked_fill(~_support(scores, distributions.top_k, distributions.top_p), -torch.inf)
    logprobs = torch.log_softmax(scores, dim=-1)
    cumulative = logprobs.exp().cumsum(dim=-1, dtype=torch.float64)
    # the first token whose cumulative probability exceeds the target: one of probability 0 never
    # does
    target = (uniform * cumulative[:, -1]).unsqueeze(1)
    tokens = torch.searchsorted(cumulative, target, right=True).clamp_(max=logits.shape[-1] - 1)
    if distributions.greedy is not None:
        tokens = torch.where(distributions.greedy.unsqueeze(1), scores.argmax(dim=-1, keepdim=True), tokens)
    return tokens.squeeze(1), logprobs.gather(1, tokens).squeeze(1)


def _support(scores: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Return bool [rows, vocabulary]: the fewest of the ``top_k`` likeliest that reach ``top_p``.
    Ties are broken by token id. Rows with everything allowed keep their whole vocabulary."""
    ordered, order = scores.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(scores.shape[-1], device=scores.device)
    within_k = rank < top_k
    probabilities = torch.softmax(ordered.masked_fill(~within_k, -torch.inf), dim=-1)
    before = probabilities.cumsum(dim=-1, dtype=torch.float64) - probabilities
    kept = within_k & ((before < top_p) | (top_p >= 1.0))
    kept[:, 0] = True
    return torch.zeros_like(kept).scatter_(1, order, kept)
