"""The loss of one step on packed tokens: the rule's own, off-policy weight, KL, entropy, imitation.

Inputs are the response tokens of whole rows, packed end to end [N]. ``pipeline.algorithms.base``
shows how a training backend calls it."""

from __future__ import annotations

import torch
from jaxtyping import Shaped
from torch import Tensor

from pipeline.algorithms.base import Rule
from pipeline.algorithms.terms.clip import TokenLoss
from pipeline.algorithms.terms.guided import GuidedLogprobs, token_credit
from pipeline.algorithms.terms.importance import (
    approximate_proximal,
    behavior_ratio,
    correction_weights,
    rejection_mask,
)
from pipeline.algorithms.terms.kl import kl_estimate, token_divergence
from pipeline.algorithms.terms.loss_terms import LossTerms
from pipeline.algorithms.terms.tokens import Ints, Mask, Tokens
from pipeline.config.learning import Importance, Proximal, Rejection
from protocol.errors import ConfigError


def imitation_loss(logprobs: Tokens, mask: Mask) -> Tokens:
    """Return ``-logp`` on the mask. Loss and gradient are exactly 0 elsewhere."""
    return -logprobs.where(mask, logprobs.new_zeros(()))


def policy_loss(
    rule: Rule,
    *,
    logprobs: Tokens,
    old_logprobs: Tokens,
    behavior_logprobs: Tokens,
    reference_logprobs: Tokens | None,
    entropy: Tokens | None,
    advantages: Tokens,
    mask: Mask,
    row_ids: Ints,
    num_rows: int,
    versions: Ints | None = None,
    mean_weight: float = 1.0,
    guided: GuidedLogprobs | None = None,
) -> tuple[Tokens, dict[str, Tokens]]:
    """Return each token's loss, differentiable in ``logprobs`` and ``entropy``, and each token's
    metrics.

    Loss and gradient are exactly 0 on rejected tokens and off the mask, whatever the values there.
    The loss is the sum of the products with ``token_weights``. A metric's mean is its sum over all
    micro-batches divided by the number of tokens in the mask.

    ``logprobs`` are the current policy's and set the float type. ``old_logprobs`` are the proximal
    policy's, read only if ``needs_old``. ``row_ids`` are 0 .. num_rows - 1, rows whole.
    ``mean_weight`` is ``importance.mean_weight`` of the whole mini-batch, or 1. ``guided`` is None
    if no row has guidance. Raises ValueError if one of these is missing: ``reference_logprobs`` if
    ``needs_reference``, ``entropy`` if ``needs_entropy``, ``versions`` if the proximal policy is
    interpolated."""
    zero = logprobs.new_zeros(())

    def on_mask(values: Shaped[Tensor, " tokens"]) -> Tokens:
        return values.to(logprobs.dtype).where(mask, zero)

    logprobs = on_mask(logprobs)
    behavior = on_mask(behavior_logprobs)
    proximal = _proximal(rule, on_mask(old_logprobs), behavior, logprobs, versions)
    advantages = on_mask(advantages)
    if guided is not None:
        parts = on_mask(guided.standard_logprobs), on_mask(guided.judge_logprobs)
        guided = GuidedLogprobs(*parts, guided.has_standard & mask, guided.has_judge & mask, guided.states)
        if rule.mixes_guidance:
            advantages = advantages * token_credit(guided, advantages, mask, row_ids, num_rows, rule.guidance)
    terms = LossTerms(
        logprobs=logprobs,
        proximal=proximal,
        advantages=advantages,
        mask=mask,
        row_ids=row_ids,
        num_rows=num_rows,
        guided=guided,
    )
    term = own_loss(rule, terms)
    rho = behavior_ratio(rule.sampled.importance_level, proximal, behavior, mask, row_ids, num_rows)
    bounded = correction_weights(rule.sampled, rho)
    weight = bounded if mean_weight == 1.0 else bounded / mean_weight
    metrics = {
        "clip_fraction": term.clipped,
        "dual_clip_fraction": term.dual_clipped,
        "approx_kl": -terms.log_ratio,
        "policy_ratio": terms.ratio,
        "importance_ratio": rho,
        "importance_weight": weight,
        "importance_cut_fraction": bounded != rho,
        **token_divergence(proximal, behavior),
    }
    if term.flagged is not None:
        metrics["flagged_fraction"] = term.flagged
    trained = mask
    if rule.sampled.rejection is not Rejection.NONE:
        trained = mask & rejection_mask(rule.sampled, proximal, behavior, mask, row_ids, num_rows)
        metrics["rejected_fraction"] = ~trained
    loss = term.loss * weight
    if reference_logprobs is not None:
        divergence = kl_estimate(logprobs, on_mask(reference_logprobs), rule.settings.kl_estimator)
        metrics["reference_kl"] = divergence
        if rule.needs_reference:
            loss = loss + rule.settings.kl_coefficient * divergence
    elif rule.needs_reference:
        raise ValueError(
            f"reference_logprobs is None, but kl_coefficient is {rule.settings.kl_coefficient}; pass the reference policy's "
            "log-probs, or set the coefficient to 0"
        )
    if entropy is not None:
        entropy = on_mask(entropy)
        metrics["entropy"] = entropy
        if rule.needs_entropy:
            loss = loss - rule.settings.entropy_coefficient * entropy
    elif rule.needs_entropy:
        raise ValueError(
            f"entropy is None, but entropy_coefficient is {rule.settings.entropy_coefficient}; pass the policy's entropies, "
            "or set the coefficient to 0"
        )
    return loss.where(trained, zero), {name: on_mask(value.detach()) for name, value in metrics.items()}


def own_loss(rule: Rule, terms: LossTerms) -> TokenLoss:
    """Return the rule's own loss of each token. Raises ConfigError unless it has one number per token."""
    found = rule.token_loss(terms)
    if isinstance(found, torch.Tensor) and found.shape == terms.mask.shape:
        found = TokenLoss(found, torch.zeros_like(terms.mask), torch.zeros_like(terms.mask))
    if not isinstance(found, TokenLoss) or found.loss.shape != terms.mask.shape:
        loss = found.loss if isinstance(found, TokenLoss) else found
        got = f"a loss of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(found).__name__
        raise ConfigError(
            f"token_loss of algorithm.name {rule.name!r} returned {got}, expected the loss of each of {terms.mask.numel()} "
            "tokens: return a TokenLoss or a tensor of that shape"
        )
    return found


def _proximal(rule: Rule, old: Tokens, behavior: Tokens, current: Tokens, versions: Ints | None) -> Tokens:
    if rule.sampled.importance is Importance.BYPASS:
        return behavior
    if rule.sampled.proximal is Proximal.RECOMPUTE:
        return old
    if versions is None:
        raise ValueError(
            "versions is None, but the proximal policy is interpolated between versions; pass the version of each token, "
            "or set algorithm.proximal to recompute"
        )
    # the policy being trained becomes the next version
    is_linear = rule.sampled.proximal is Proximal.INTERPOLATE_LINEAR
    version = rule.proximal_version + 1
    return approximate_proximal(behavior, current, versions, current_version=version, linear=is_linear)
