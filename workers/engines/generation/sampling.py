"""Token sampling from random streams that belong to the trajectory, not to the sampling process.

Logits ``[rows, vocabulary]`` and one uniform number per row give tokens, and their log-probs under
the distribution that was sampled from.

The uniform is the trajectory's random stream at the response position
(``workers.engines.model.rng``). The token is the inverse of the cumulative distribution there, in
vocabulary order: first the block of tokens in which it falls, by the blocks' sums, then the token,
by cumulative sums within that block alone. Sums across blocks are in float64, those of a block's
tokens in float32, so kernels that differ in the last bit move a boundary by about 1e-7; a token
changes only if the uniform falls that close to a boundary.

The distribution has the definitions and the order of vLLM's sampler. Penalties come first: for
repetition over prompt and response, for frequency and presence over the response. Temperature,
min-p, top-k and top-p follow, each applied to what the previous one left, renormalised."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch

from workers.engines.generation.seam import SamplingParams

Contexts = Callable[[int], tuple[np.ndarray, int]]
"""Returns a row's whole context, int [tokens], and the number of them that are prompt."""


@dataclass(frozen=True, slots=True)
class Penalties:
    """The rows of a batch whose logits depend on earlier tokens."""

    rows: list[int]
    repetition: torch.Tensor
    """float32 [len(rows), 1], like the next two"""
    frequency: torch.Tensor
    presence: torch.Tensor

    @classmethod
    def of(cls, params: Sequence[SamplingParams], device: torch.device) -> Self | None:
        named = {row: (p.repetition_penalty, p.frequency_penalty, p.presence_penalty) for row, p in enumerate(params)}
        named = {row: penalties for row, penalties in named.items() if penalties != (1.0, 0.0, 0.0)}
        if not named:
            return None
        columns = torch.tensor(list(named.values()), dtype=torch.float32, device=device)
        return cls(list(named), *columns.split(1, dim=1))

    def apply(self, logits: torch.Tensor, contexts: Contexts) -> torch.Tensor:
        """Return logits [rows, vocabulary] with penalties applied; only penalised contexts are
        read.

        The logit of a token that is in the context is divided by the repetition penalty if
        positive, else multiplied by it. Then the frequency penalty times the token's count in the
        response is subtracted, and the presence penalty if it occurs."""
        vocabulary = logits.shape[-1]
        seen, counts = [], []
        for row in self.rows:
            context, num_prompt = contexts(row)
            tokens = torch.from_numpy(np.asarray(context, np.int64))
            seen.append(torch.bincount(tokens, minlength=vocabulary) > 0)
            counts.append(torch.bincount(tokens[num_prompt:], minlength=vocabulary))
        counted = torch.stack(counts).to(logits.device)
        chosen = logits[self.rows]
        repeated = torch.where(chosen > 0, chosen / self.repetition, chosen * self.repetition)
        chosen = torch.where(torch.stack(seen).to(logits.device), repeated, chosen)
        chosen = chosen - self.frequency * counted - self.presence * (counted > 0)
        penalised = logits.clone()
        penalised[self.rows] = chosen
        return penalised


@dataclass(frozen=True, slots=True)
class Distributions:
    """How the logits of a batch's rows become distributions; built once, used for many steps."""

    divisor: torch.Tensor | None
    """float32 [rows, 1]: temperatures, 1 for greedy rows; None if all are 1."""
    greedy: torch.Tensor | None
    """bool [rows]; None if no row is greedy."""
    top_k: torch.Tensor | None
    """int64 [rows, 1], the vocabulary size for rows without top-k; None if no row has top-k or
    top-p."""
    top_p: torch.Tensor | None
    """float32 [rows, 1]; given if ``top_k`` is."""
    min_p: torch.Tensor | None = None
    """float32 [rows, 1], logarithms, -inf for rows without min-p; None if no row has it."""
    penalties: Penalties | None = None

    @property
    def is_plain(self) -> bool:
        """Whether logits of non-greedy rows are used as they are."""
        return self.divisor is self.top_k is self.min_p is self.penalties is None

    @classmethod
    def of(cls, params: Sequence[SamplingParams], vocabulary: int, device: torch.device) -> Distributions:
        temperatures = [p.temperature or 1.0 for p in params]
        greedy = [p.temperature == 0.0 for p in params]
        restricted = any((0 < p.top_k < vocabulary or p.top_p < 1.0) and p.temperature > 0.0 for p in params)
        top_k = [p.top_k if p.top_k > 0 and p.temperature > 0.0 else vocabulary for p in params]
        top_p = [p.top_p if p.temperature > 0.0 else 1.0 for p in params]
        min_p = [p.min_p if p.temperature > 0.0 else 0.0 for p in params]

        def column(values: Sequence[float], dtype: torch.dtype) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype, device=device).unsqueeze(1)

        return cls(
            divisor=column(temperatures, torch.float32) if any(t != 1.0 for t in temperatures) else None,
            greedy=torch.tensor(greedy, device=device) if any(greedy) else None,
            top_k=column(top_k, torch.int64) if restricted else None,
            top_p=column(top_p, torch.float32) if restricted else None,
            min_p=column(min_p, torch.float32).log() if any(min_p) else None,
            penalties=Penalties.of(params, device),
        )


def sample(
    logits: torch.Tensor, distributions: Distributions, uniform: torch.Tensor, contexts: Contexts | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample from logits [rows, vocabulary]: int64 [rows] tokens and float32 [rows] log-probs.

    A greedy row takes the first of its largest logits, after penalties; its log-prob is that of the
    temperature-1 distribution. ``uniform`` is float64 [rows] in (0, 1). Raises ValueError for
    penalties without ``contexts``."""
    scores = logits if distributions.is_plain else logits.float()
    if distributions.penalties is not None:
        if contexts is None:
            raise ValueError(
                "rows have penalties, which count earlier tokens, but no contexts were given; give contexts"
            )
        scores = distributions.penalties.apply(scores, contexts)
    if distributions.divisor is not None:
        scores = scores / distributions.divisor
    if distributions.min_p is not None:
        least = scores.amax(dim=-1, keepdim=True) + distributions.min_p
        scores = scores.masked_fill(scores < least, -torch.inf)
    if distributions.top_k is not None and distributions.top_p is not None:
        scores = scores.masked_fill(~_support(scores, distributions.top_k, distributions.top_p), -torch.inf)
    largest = scores.amax(dim=-1, keepdim=True).float()
    tokens, log_total = _draw((scores - largest).exp_(), uniform)
    if distributions.greedy is not None:
        tokens = torch.where(distributions.greedy, scores.argmax(dim=-1), tokens)
    chosen = scores.gather(1, tokens[:, None]) - largest
    return tokens, chosen.squeeze(1) - log_total


_BLOCK = 256
"""Tokens of a block, so that a vocabulary of 50,000 has about as many blocks as a block has tokens."""


def _draw(weights: torch.Tensor, uniform: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw a token of each row in proportion to float32 ``weights`` [rows, vocabulary].

    Returns int64 [rows] tokens, never one of weight 0, and the logarithms of the rows' sums, float32
    [rows]."""
    rows, vocabulary = weights.shape
    if vocabulary % _BLOCK:
        weights = torch.nn.functional.pad(weights, (0, _BLOCK - vocabulary % _BLOCK))
    blocks = weights.view(rows, -1, _BLOCK)
    sums = blocks.sum(dim=-1).double()
    below = sums.cumsum(dim=-1)
    target = (uniform * below[:, -1]).unsqueeze(1)
    # the first block whose cumulative sum exceeds the target, so never one whose tokens all weigh 0
    block = torch.searchsorted(below, target, right=True).clamp_(max=blocks.shape[1] - 1)
    share = (1.0 - (below.gather(1, block) - target) / sums.gather(1, block)).clamp_(min=0.0)
    within = blocks[torch.arange(rows, device=weights.device), block.squeeze(1)].cumsum(dim=-1, dtype=torch.float64)
    total = within[:, -1:]
    # below the block's total even after rounding, so the first token that exceeds it has a weight
    rest = torch.minimum(share * total, torch.nextafter(total, torch.zeros_like(total)))
    token = torch.searchsorted(within, rest, right=True) + block * _BLOCK
    # only sums that are not numbers lead past the end; the log-prob is then none either
    return token.squeeze(1).clamp_(max=vocabulary - 1), below[:, -1].log().float()


def _support(scores: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Return bool [rows, vocabulary]: the fewest of the ``top_k`` likeliest tokens that reach
    ``top_p``. Ties are broken by token id. Rows without a restriction keep their whole vocabulary."""
    ordered, order = scores.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(scores.shape[-1], device=scores.device)
    within_k = rank < top_k
    probabilities = torch.softmax(ordered.masked_fill(~within_k, -torch.inf), dim=-1)
    before = probabilities.cumsum(dim=-1, dtype=torch.float64) - probabilities
    kept = within_k & ((before < top_p) | (top_p >= 1.0))
    kept[:, 0] = True
    return torch.zeros_like(kept).scatter_(1, order, kept)
