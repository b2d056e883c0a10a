"""Soft over-long punishment (DAPO, arXiv 2503.14476, section 3.4, equation 13). A pure function; no torch."""

from __future__ import annotations


def soft_overlong_penalty(num_tokens: int, *, max_tokens: int, cache_tokens: int, factor: float = 1.0) -> float:
    """Return the summand that a response's length adds to its reward: 0, then linear over the last tokens, then -factor.

    With L the limit and C the cache: 0 while n <= L - C; factor * ((L - C) - n) / C while n <= L; -factor beyond.

    Args:
        num_tokens: n, tokens of the response.
        max_tokens: L, the hard generation limit.
        cache_tokens: C, length of the soft interval; at least 1.
        factor: size of the full punishment.

    Raises:
        ValueError: the soft interval is empty or longer than the limit.
    """
    if not 0 < cache_tokens <= max_tokens:
        raise ValueError(f"cache_tokens is {cache_tokens}; expected 1 to max_tokens ({max_tokens})")
    excess = num_tokens - (max_tokens - cache_tokens)
    if excess <= 0:
        return 0.0
    return -factor * min(excess / cache_tokens, 1.0)
