"""Ratios of probabilities: of each token, and of whole responses (GSPO)."""

from __future__ import annotations

from pipeline.algorithms.terms.tokens import Floats, Ints, Mask, Tokens, row_mean

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to +-20 before exponentiation, so that no ratio overflows (verl)."""
MAX_SEQUENCE_LOG_RATIO = 10.0
"""Upper clamp of GSPO's log-ratio (verl)."""


def log_ratio(logprobs: Floats, old_logprobs: Floats) -> Floats:
    """Return ``z = clamp(logp - old, -20, 20)``; the ratio is ``exp(z)``. PPO, with verl's clamp."""
    return (logprobs - old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def sequence_ratio(logprobs: Tokens, old_logprobs: Tokens, mask: Mask, row_ids: Ints, num_rows: int) -> Tokens:
    """Return GSPO's ratio at each token: the geometric mean of its row's token ratios.

    ``s_i = exp(mean_t (logp_t - old_t))``, written per token as ``sg(s_i) exp(logp_t -
    sg(logp_t))`` so that each token has its own gradient. GSPO (2507.18071, section 4.3,
    GSPO-token)."""
    mean = row_mean((logprobs - old_logprobs).detach(), mask, row_ids, num_rows)
    exponent = logprobs - logprobs.detach() + mean[row_ids]
    return exponent.clamp(max=MAX_SEQUENCE_LOG_RATIO).exp()
