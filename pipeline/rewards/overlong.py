"""Soft over-long punishment, in numpy only, so that reward workers stay light."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike


def soft_overlong_penalty(lengths: ArrayLike, *, max_tokens: int, cache_tokens: int, factor: float = 1.0) -> np.ndarray:
    """Return the penalty of each response, float64 [responses], between ``-factor`` and 0.

        P = 0                                         |y| <= L_max - L_cache
          = factor ((L_max - L_cache) - |y|) / L_cache   up to L_max
          = -factor                                   beyond

    It is applied once, when a response has finished, on its whole length (``lengths``, stop token
    included). L_max is ``max_tokens``, L_cache is ``cache_tokens``. In verl it falls on beyond
    L_max; a generator that stops there never gets so far. DAPO (2503.14476, eq. 13). Raises
    ValueError: ``cache_tokens`` is not within 1 .. ``max_tokens``."""
    if not 1 <= cache_tokens <= max_tokens:
        limit = f"1 .. max_tokens ({max_tokens}): it is the last part of the length limit"
        raise ValueError(f"cache_tokens is {cache_tokens}; expected {limit}")
    excess = np.asarray(lengths, dtype=np.float64) - (max_tokens - cache_tokens)
    share = np.clip(excess / cache_tokens, 0.0, 1.0)
    return 0.0 - share * factor
