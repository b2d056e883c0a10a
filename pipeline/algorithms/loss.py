"""The loss of one step on packed tokens: surrogate, off-policy weight, KL, entropy, imitation.

Inputs are the response tokens of whole rows, packed end to end [N].
``pipeline.algorithms.objective`` shows how a training backend calls it."""

from __future__ import annotations

from jaxtyping import Shaped
from torch import Tensor

from pipeline.algorithms.objective import Importance, Objective, Proximal, Rejection
from pipeline.algorithms.terms.guided import token_credit
from pipeline.algorithms.terms.importance import (
    approximate_proximal,
    behavior_ratio,
    correction_weights,
    rejection_mask,
)
from pipeline.algorithms.terms.kl import kl_estimate, token_divergence
from pipeline.algorithms.terms.ratio import (
    GuidedLogprobs,
    Ints,
    Mask,
    SurrogateTerms,
    Tokens,
    log_ratio,
    surrogate_loss,
)


def imitation_loss(logprobs: Tokens, mask: Mask) -> Tokens:
    """Return ``-logp`` on the mask. Loss and gradient are exactly 0 elsewhere."""
    return -logprobs.where(mask, logprobs.new_zeros(()))


def token_loss(
    objective: Objective,
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
    proximal = _proximal(objective, on_mask(old_logprobs), behavior, logprobs, versions)
    advantages = on_mask(advantages)
    if guided is not None:
        parts = on_mask(guided.standard_logprobs), on_mask(guided.judge_logprobs)
        guided = GuidedLogprobs(*parts, guided.has_standard & mask, guided.has_judge & mask, guided.states)
        if objective.mixes_guidance:
            advantages = advantages * token_credit(guided, advantages, mask, row_ids, num_rows, objective.guidance)
    exponent = log_ratio(logprobs, proximal)
    terms = SurrogateTerms(
        logprobs=logprobs,
        proximal=proximal,
        ratio=exponent.exp(),
        advantages=advantages,
        mask=mask,
        row_ids=row_ids,
        num_rows=num_rows,
        clip_low=objective.clip_low,
        clip_high=objective.clip_high,
        dual_clip=objective.dual_clip,
        guided=guided,
        guidance=objective.guidance,
    )
    term = surrogate_loss(objective.surrogate, terms)
    rho = behavior_ratio(objective.importance_level, proximal, behavior, mask, row_ids, num_rows)
    bounded = correction_weights(objective, rho)
    weight = bounded if mean_weight == 1.0 else bounded / mean_weight
    metrics = {
        "clip_fraction": term.clipped,
        "dual_clip_fraction": term.dual_clipped,
        "approx_kl": -exponent,
        "policy_ratio": exponent.exp(),
        "importance_ratio": rho,
        "importance_weight": weight,
        "importance_cut_fraction": bounded != rho,
        **token_divergence(proximal, behavior),
    }
    if term.flagged is not None:
        metrics["flagged_fraction"] = term.flagged
    trained = mask
    if objective.rejection is not Rejection.NONE:
        trained = mask & rejection_mask(objective, proximal, behavior, mask, row_ids, num_rows)
        metrics["rejected_fraction"] = ~trained
    loss = term.loss * weight
    if reference_logprobs is not None:
        divergence = kl_estimate(logprobs, on_mask(reference_logprobs), objective.kl_estimator)
        metrics["reference_kl"] = divergence
        if objective.needs_reference:
            loss = loss + objective.kl_coefficient * divergence
    elif objective.needs_reference:
        raise ValueError(
            f"reference_logprobs is None, but kl_coefficient is {objective.kl_coefficient}; pass the reference policy's "
            "log-probs, or set the coefficient to 0"
        )
    if entropy is not None:
        entropy = on_mask(entropy)
        metrics["entropy"] = entropy
        if objective.needs_entropy:
            loss = loss - objective.entropy_coefficient * entropy
    elif objective.needs_entropy:
        raise ValueError(
            f"entropy is None, but entropy_coefficient is {objective.entropy_coefficient}; pass the policy's entropies, or set "
            "the coefficient to 0"
        )
    return loss.where(trained, zero), {name: on_mask(value.detach()) for name, value in metrics.items()}


def _proximal(objective: Objective, old: Tokens, behavior: Tokens, current: Tokens, versions: Ints | None) -> Tokens:
    if objective.importance is Importance.BYPASS:
        return behavior
    if objective.proximal is Proximal.RECOMPUTE:
        return old
    if versions is None:
        raise ValueError(
            "versions is None, but the proximal policy is interpolated between versions; pass the version of each token, "
            "or set algorithm.proximal to recompute"
        )
    # the policy being trained becomes the next version
    is_linear = objective.proximal is Proximal.INTERPOLATE_LINEAR
    version = objective.proximal_version + 1
    return approximate_proximal(behavior, current, versions, current_version=version, linear=is_linear)
