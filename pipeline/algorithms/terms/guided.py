"""Losses from token-level guidance: NLFT as published, and a first-error variant.

Every response token has three probabilities: p_b from the current policy given the question alone,
and from the frozen reference policy p_s given the standard prompt (with the gold text) and p_j
given the judge prompt (with the judgment). Weights and flags carry no gradient.

    right      w (-log p_b) + c (-log p_b),   w = (p_s / tau)^0.6 up to tau, 1 + ((p_s - tau) / (1 - tau))^5 above
    wrong      u = [p_j / p_b > 1.5] [p_j / p_s > 1.5] [p_j > 0.01]
               u: 2 sigma(p_j / p_b - 1.5) (-log(1 - p_b)),   else p_s^0.5 (-log p_b), or 0 where over 6 % are flagged
    first      e: the first token with p_j / p_s > 1.5 and p_j > 0.01
    error      before e p_s^0.5 (-log p_b),   at e 2 sigma(p_j / p_s - 1.5) (-log(1 - p_b)),   after e nothing

With ``clusters``, w is ``(p_s / tau)^0.3`` in a cluster around tokens above tau, and the published
form has no loss on unflagged tokens in a cluster around flagged ones.

Everything is multiplied by ``loss_scale``. The sign of the advantage is the verdict. A right
response without guidance is imitated with w = 1. A wrong one without a judgment has no loss, nor,
in the first-error variant, has one without a flagged token.

Sources: 2412.20382 and its public code. The first-error variant is ours: the published test of p_j
/ p_b cannot flag a token with p_b above 2/3, which is a confident error."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import cosine_similarity

from pipeline.algorithms.terms.clip import TokenLoss
from pipeline.algorithms.terms.ratio import log_ratio
from pipeline.algorithms.terms.tokens import Flags, Floats, Ints, Mask, Tokens, row_mean
from pipeline.config.rewards import GuidanceSection


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


def clusters(
    salient: Mask, states: Float[Tensor, "tokens hidden"], mask: Mask, row_ids: Ints, settings: GuidanceSection
) -> Mask:
    """Mark the clusters around ``salient`` tokens, within ``mask`` and their row.

    A cluster grows from its salient token in both directions, one token at a time, while the next
    token's hidden state is close to the cluster's mean. A salient token itself is marked only if
    another cluster reaches it. ``states`` are last hidden states of any float type. All clusters
    grow at the same time, so the run time is that of the longest."""
    found = torch.zeros_like(salient)
    states = states.float()
    for step in (-1, 1):
        at = salient.nonzero().squeeze(1)
        # sums serve as means: cosine distance only sees the direction
        passed = states[at]
        while at.numel():
            there = (at + step).clamp(0, found.numel() - 1)
            is_inside = (there != at) & (row_ids[there] == row_ids[at]) & mask[there]
            distance = 1.0 - cosine_similarity(states[there], passed, dim=1)
            is_far = distance > settings.cluster_distance
            goes_on = is_inside & (is_far if settings.dissimilar_clusters else ~is_far)
            at, passed = there[goes_on], passed[goes_on] + states[there[goes_on]]
            found[at] = True
    return found


_LEAST_REST = 1e-6
"""Lower bound of ``1 - p``, so that a token of probability 1 has a finite loss and gradient."""


def standard_weights(standard_logprobs: Floats, settings: GuidanceSection, clustered: Flags | None = None) -> Floats:
    """Return the weight w of each token of a right response, from 0 to 2. ``clustered`` tokens use
    ``cluster_power``."""
    tau = settings.standard_threshold
    standard = standard_logprobs.exp()
    powers = torch.full_like(standard, settings.standard_power)
    if clustered is not None:
        powers = powers.masked_fill(clustered, settings.cluster_power)
    below = ((standard_logprobs - math.log(tau)) * powers).exp()
    above = 1.0 + ((standard - tau) / (1.0 - tau)).clamp(min=0.0) ** settings.bonus_power
    return torch.where(standard > tau, above, below)


def unflagged_weights(standard_logprobs: Floats, settings: GuidanceSection) -> Floats:
    """Return the weights, from 0 to 1, of a wrong response's unflagged tokens."""
    return (standard_logprobs * settings.unflagged_power).exp()


def blame(judge_logprobs: Floats, logprobs: Floats, settings: GuidanceSection) -> Floats:
    """Return ``2 sigma(p_j / p - judge_ratio)``, the weight of a flagged token of probability p."""
    return 2.0 * torch.sigmoid(log_ratio(judge_logprobs, logprobs).exp() - settings.judge_ratio)


def suspicions(standard_logprobs: Floats, judge_logprobs: Floats, settings: GuidanceSection) -> Flags:
    """Mark the tokens that are likely under the judge prompt, and likelier than under the standard prompt."""
    is_likely = judge_logprobs.exp() > settings.min_judge_probability
    return is_likely & (log_ratio(judge_logprobs, standard_logprobs).exp() > settings.judge_ratio)


def published_flags(
    logprobs: Floats, standard_logprobs: Floats, judge_logprobs: Floats, settings: GuidanceSection
) -> Flags:
    """Mark the tokens that are likely under the judge prompt, and likelier than under both other prompts."""
    against_base = log_ratio(judge_logprobs, logprobs).exp() > settings.judge_ratio
    return against_base & suspicions(standard_logprobs, judge_logprobs, settings)


def unlikelihood(logprobs: Floats) -> Floats:
    """Return ``-log(1 - p)`` of each token, with its gradient ``p / (1 - p)``.

    ``1 - p`` is at least 1e-6 in both. Without the bound, float32 would give a token of probability
    1 a gradient of 0 or infinity, and confident errors are what this loss is for."""
    rest = (-torch.expm1(logprobs.detach())).clamp(min=_LEAST_REST)
    slope = logprobs.detach().exp() / rest
    return slope * (logprobs - logprobs.detach()) - rest.log()


def first_places(flags: Mask, row_ids: Ints, num_rows: int) -> Ints:
    """Return for each token the index in the batch of its row's first flag, or the batch's size if
    the row has none."""
    none = flags.numel()
    places = torch.arange(none, device=flags.device)
    chosen = places.where(flags, places.new_full((), none))
    return places.new_full((num_rows,), none).scatter_reduce(0, row_ids, chosen, reduce="amin")[row_ids]


def published_weights(
    logprobs: Tokens, guided: GuidedLogprobs, mask: Mask, row_ids: Ints, num_rows: int, settings: GuidanceSection
) -> tuple[Mask, Tokens]:
    """Return the flagged tokens of wrong responses, and the weight of each of their tokens, 0 off
    ``mask``. ``logprobs`` are the current policy's."""
    standard, judge = guided.standard_logprobs, guided.judge_logprobs
    flagged = mask & published_flags(logprobs, standard, judge, settings)
    share = row_mean(flagged.to(logprobs.dtype), mask, row_ids, num_rows)[row_ids]
    others = unflagged_weights(standard, settings) * (share <= settings.max_flagged_share)
    if settings.clusters:
        others = others * ~clusters(flagged, _states(guided), mask, row_ids, settings)
    return flagged, torch.where(flagged, blame(judge, logprobs, settings), others * mask)


def first_error_weights(
    guided: GuidedLogprobs, mask: Mask, row_ids: Ints, num_rows: int, settings: GuidanceSection
) -> tuple[Mask, Tokens]:
    """Return the first error of each wrong response, and the weight of each of their tokens: 0 off
    ``mask``, after the error, and in responses without one."""
    standard, judge = guided.standard_logprobs, guided.judge_logprobs
    first = first_places(mask & suspicions(standard, judge, settings), row_ids, num_rows)
    places = torch.arange(first.numel(), device=first.device)
    flagged = places == first
    is_before = mask & (places < first) & (first < first.numel())
    return flagged, torch.where(
        flagged, blame(judge, standard, settings), unflagged_weights(standard, settings) * is_before
    )


def token_credit(
    guided: GuidedLogprobs, advantages: Tokens, mask: Mask, row_ids: Ints, num_rows: int, settings: GuidanceSection
) -> Tokens:
    """Return the factor of each token's advantage, which averages 1 over a response's loss tokens.

    A right response distributes its credit by w, a wrong one by ``2 sigma(p_j / p_s -
    judge_ratio)`` with p_j taken as 0 below the minimum; so no token of a wrong response counts
    more than six times another. The factor is 1 without guidance, and where the advantage's sign
    contradicts the verdict. This is our addition; the paper has no such factor."""
    is_likely = guided.judge_logprobs.exp() > settings.min_judge_probability
    judge = guided.judge_logprobs.where(is_likely, guided.standard_logprobs.detach() - 20.0)
    weights = torch.where(
        guided.has_judge,
        blame(judge, guided.standard_logprobs, settings),
        standard_weights(guided.standard_logprobs, settings),
    )
    present = mask & guided.has_standard
    means = row_mean(weights, present, row_ids, num_rows)[row_ids]
    is_meant = present & torch.where(guided.has_judge, advantages < 0.0, advantages > 0.0)
    return (weights / means).where(is_meant, torch.ones_like(weights))


def _states(guided: GuidedLogprobs) -> Tensor:
    if guided.states is None:
        raise ValueError(
            "the hidden states are None, but guidance.clusters is on; pass the policy's hidden states, or turn clusters off"
        )
    return guided.states


def absent(mask: Mask, like: Tokens, *, with_states: bool) -> GuidedLogprobs:
    """Return the columns of a micro-batch without any guidance."""
    zeros, nothing = torch.zeros_like(like), torch.zeros_like(mask)
    return GuidedLogprobs(zeros, zeros, nothing, nothing, zeros[:, None] if with_states else None)


def guided_loss(
    logprobs: Tokens,
    advantages: Tokens,
    guided: GuidedLogprobs,
    mask: Mask,
    row_ids: Ints,
    flagged: Mask,
    weights: Tokens,
    settings: GuidanceSection,
) -> TokenLoss:
    """Combine the loss of right responses with that of wrong ones, whose flags and ``weights`` are
    given. The sign of the advantage is the verdict."""
    wrong = weights * torch.where(flagged, unlikelihood(logprobs), -logprobs)
    clustered = None
    if settings.clusters:
        told = mask & (advantages > 0.0) & guided.has_standard
        salient = told & (guided.standard_logprobs.exp() > settings.standard_threshold)
        clustered = clusters(salient, _states(guided), told, row_ids, settings)
    credit = standard_weights(guided.standard_logprobs, settings, clustered)
    credit = credit.where(guided.has_standard, torch.ones_like(weights))
    right = -(credit + settings.nll_coefficient) * logprobs
    nothing = torch.zeros_like(mask)
    loss = settings.loss_scale * torch.where(advantages > 0.0, right, wrong)
    return TokenLoss(loss, nothing, nothing, flagged=flagged)
