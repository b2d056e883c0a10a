"""Surrogate losses of each token: clipped ratio, sequence ratio, clipped weight, and clipped value
loss.

Losses are not aggregated here, and the caller handles masked tokens; see
:class:`pipeline.algorithms.objective.Objective`. A surrogate is a function of
:class:`SurrogateTerms`, found by its short name or import path."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, TypeAlias, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from pipeline.algorithms.guidance import PUBLISHED, GuidanceSettings
from pipeline.config.import_path import import_own
from protocol.errors import ConfigError

Tokens: TypeAlias = Float[Tensor, " tokens"]
"""One number per token of a packed batch."""
Mask: TypeAlias = Bool[Tensor, " tokens"]
Ints: TypeAlias = Int[Tensor, " tokens"]
Floats: TypeAlias = Float[Tensor, "*tokens"]
"""Numbers per token, in any shape."""
Flags: TypeAlias = Bool[Tensor, "*tokens"]


def row_sum(values: Tokens, mask: Mask, row_ids: Ints, num_rows: int) -> Float[Tensor, " rows"]:
    """Sum ``values`` over each row's tokens in the mask; 0 for a row without any."""
    return values.new_zeros(num_rows).index_add(0, row_ids, values.where(mask, values.new_zeros(())))


def row_counts(mask: Mask, row_ids: Ints, num_rows: int) -> Int[Tensor, " rows"]:
    """Count each row's tokens in the mask."""
    return row_ids.new_zeros(num_rows).index_add(0, row_ids, mask.to(row_ids.dtype))


def row_mean(values: Tokens, mask: Mask, row_ids: Ints, num_rows: int) -> Float[Tensor, " rows"]:
    """Average ``values`` over each row's tokens in the mask; 0 for a row without any."""
    counts = row_counts(mask, row_ids, num_rows).clamp(min=1)
    return row_sum(values, mask, row_ids, num_rows) / counts.to(values.dtype)


def row_max(values: Tokens, mask: Mask, row_ids: Ints, num_rows: int) -> Float[Tensor, " rows"]:
    """Return the largest of ``values`` over each row's tokens in the mask, else -inf. Not differentiable."""
    lowest = values.new_full((), float("-inf"))
    return lowest.repeat(num_rows).scatter_reduce(0, row_ids, values.detach().where(mask, lowest), reduce="amax")


MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to +-20 before exponentiation, so that no ratio overflows (verl)."""
MAX_SEQUENCE_LOG_RATIO = 10.0
"""Upper clamp of GSPO's log-ratio (verl)."""


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """A surrogate's loss at each token, and where its gradient was cut off."""

    loss: Floats
    clipped: Flags
    """The ratio left [1 - eps_low, 1 + eps_high] on the side that the advantage pushes to."""
    dual_clipped: Flags
    """The dual clip bounds the loss of a negative advantage."""
    flagged: Flags | None = None
    """Tokens that guidance flags as errors; None for a surrogate without guidance."""


@dataclass(frozen=True, slots=True)
class GuidedLogprobs:
    """Log-probs from the guided passes, for all tokens of a micro-batch end to end; 0 where absent."""

    standard_logprobs: Tokens
    judge_logprobs: Tokens
    has_standard: Mask
    has_judge: Mask
    """Only in wrong responses."""
    states: Float[Tensor, "tokens hidden"] | None = None
    """The last hidden states that predict the tokens, without gradient; None without clusters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SurrogateTerms:
    """A surrogate's inputs, for all tokens of a micro-batch end to end; 0 off the mask."""

    logprobs: Tokens
    """Of the current policy; the loss is differentiated with respect to them."""
    proximal: Tokens
    """Log-probs of the policy in the ratio's denominator."""
    ratio: Tokens
    """``exp(clamp(logprobs - proximal))``, differentiable."""
    advantages: Tokens
    mask: Mask
    row_ids: Ints
    """The response of each token, 0 .. num_rows - 1, rows whole."""
    num_rows: int
    clip_low: float
    clip_high: float
    dual_clip: float
    """0 disables it."""
    guided: GuidedLogprobs | None = None
    """None if no response of the micro-batch has guidance."""
    guidance: GuidanceSettings = PUBLISHED


Surrogates: TypeAlias = Callable[[SurrogateTerms], "TokenLoss | torch.Tensor"]
"""A surrogate returns a :class:`TokenLoss`, or just the loss if it clips nothing."""


def clip(terms: SurrogateTerms) -> TokenLoss:
    """Return PPO's clipped loss of each token's ratio (:func:`clipped_loss`)."""
    bounds = {"clip_low": terms.clip_low, "clip_high": terms.clip_high}
    return clipped_loss(terms.ratio, terms.advantages, **bounds, dual_clip=terms.dual_clip)


def gspo(terms: SurrogateTerms) -> TokenLoss:
    """Return the clipped loss of each response's ratio (:func:`sequence_ratio`)."""
    ratio = sequence_ratio(terms.logprobs, terms.proximal, terms.mask, terms.row_ids, terms.num_rows)
    return clipped_loss(ratio, terms.advantages, clip_low=terms.clip_low, clip_high=terms.clip_high)


def cispo(terms: SurrogateTerms) -> TokenLoss:
    """Return the log-prob loss under a clipped weight (:func:`cispo_loss`)."""
    bounds = {"clip_low": terms.clip_low, "clip_high": terms.clip_high}
    return cispo_loss(terms.logprobs, terms.ratio, terms.advantages, **bounds)


_BUILT_IN: Final[Mapping[str, str]] = {
    "clip": "pipeline.algorithms.terms.ratio:clip",
    "gspo": "pipeline.algorithms.terms.ratio:gspo",
    "cispo": "pipeline.algorithms.terms.ratio:cispo",
    "nlft": "pipeline.algorithms.terms.guided:nlft",
    "nlft-first": "pipeline.algorithms.terms.guided:nlft_first",
    "nll": "pipeline.algorithms.terms.guided:nll",
}


@cache
def surrogate_named(name: str) -> Surrogates:
    """Return a surrogate by short name or import path. Raises ConfigError if there is none."""
    found: Any = import_own("algorithm.surrogate", _BUILT_IN.get(name, name))
    if not callable(found):
        raise ConfigError(
            f"algorithm.surrogate {name!r} is {found!r}; expected a function of SurrogateTerms: name such a function"
        )
    return cast("Surrogates", found)


def surrogate_loss(name: str, terms: SurrogateTerms) -> TokenLoss:
    """Return a surrogate's loss of each token. Raises ConfigError unless it returns one number per token."""
    found = surrogate_named(name)(terms)
    if isinstance(found, torch.Tensor) and found.shape == terms.mask.shape:
        found = TokenLoss(found, torch.zeros_like(terms.mask), torch.zeros_like(terms.mask))
    if not isinstance(found, TokenLoss) or found.loss.shape != terms.mask.shape:
        loss = found.loss if isinstance(found, TokenLoss) else found
        got = f"a loss of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(found).__name__
        raise ConfigError(
            f"algorithm.surrogate {name!r} returned {got}, expected the loss of each of {terms.mask.numel()} tokens: "
            "return a TokenLoss or a tensor of that shape"
        )
    return found


def log_ratio(logprobs: Floats, old_logprobs: Floats) -> Floats:
    """Return ``z = clamp(logp - old, -20, 20)``; the ratio is ``exp(z)``. PPO, with verl's clamp."""
    return (logprobs - old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def clipped_loss(
    ratio: Floats, advantages: Floats, *, clip_low: float, clip_high: float, dual_clip: float = 0.0
) -> TokenLoss:
    """Return ``max(-A r, -A clip(r, 1 - eps_low, 1 + eps_high))``, at most ``-A c`` where A < 0.

    The gradient vanishes where A > 0 and r > 1 + eps_high, and where A < 0 and r < 1 - eps_low.
    With a dual clip (c > 1; 0 disables it) it also vanishes where A < 0 and r > c. Sources: PPO
    (1707.06347, eq. 7); decoupled bounds: DAPO (2503.14476, eq. 8); dual clip: 1912.09729, eq. 5."""
    free = -advantages * ratio
    bounded = -advantages * ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss = torch.maximum(free, bounded)
    clipped = bounded > free
    if not dual_clip:
        return TokenLoss(loss, clipped, torch.zeros_like(clipped))
    ceiling = -advantages * dual_clip
    is_negative = advantages < 0
    dual_clipped = is_negative & (loss > ceiling)
    return TokenLoss(torch.where(is_negative, torch.minimum(loss, ceiling), loss), clipped, dual_clipped)


def sequence_ratio(logprobs: Tokens, old_logprobs: Tokens, mask: Mask, row_ids: Ints, num_rows: int) -> Tokens:
    """Return GSPO's ratio at each token: the geometric mean of its row's token ratios.

    ``s_i = exp(mean_t (logp_t - old_t))``, written per token as ``sg(s_i) exp(logp_t -
    sg(logp_t))`` so that each token has its own gradient. GSPO (2507.18071, section 4.3,
    GSPO-token)."""
    mean = row_mean((logprobs - old_logprobs).detach(), mask, row_ids, num_rows)
    exponent = logprobs - logprobs.detach() + mean[row_ids]
    return exponent.clamp(max=MAX_SEQUENCE_LOG_RATIO).exp()


def cispo_loss(logprobs: Floats, ratio: Floats, advantages: Floats, *, clip_low: float, clip_high: float) -> TokenLoss:
    """Return ``-sg(clip(r, 1 - eps_low, 1 + eps_high)) A logp``, whose gradient never vanishes. The
    paper has no lower bound (eps_low = 1). CISPO (2506.13585, eq. 4 and 5)."""
    weight = ratio.detach().clamp(1.0 - clip_low, 1.0 + clip_high)
    outside = weight != ratio.detach()
    return TokenLoss(-weight * advantages * logprobs, outside, torch.zeros_like(outside))


def clipped_value_loss(
    values: Floats, old_values: Floats, targets: Floats, *, clip_low: float, clip_high: float
) -> TokenLoss:
    """Return ``max((V - R)^2, (clip(V, V_old - clip_low, V_old + clip_high) - R)^2) / 2`` per
    token.

    The gradient vanishes where the clipped error is larger and the value has left its interval.
    PPO's reference code; verl clips by 0.5 on both sides, T-PPO's port by 0.5 below and 0.6 above."""
    bounded = torch.clamp(values, old_values - clip_low, old_values + clip_high)
    free_error, bounded_error = (values - targets).square(), (bounded - targets).square()
    clipped = bounded_error > free_error
    return TokenLoss(0.5 * torch.maximum(free_error, bounded_error), clipped, torch.zeros_like(clipped))
