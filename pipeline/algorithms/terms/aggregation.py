"""Loss aggregation: the weight of each token, from the response lengths of a whole mini-batch.

The loss is ``sum over rows r and tokens t of weight[r] * token_loss[r, t]``. Numpy only.

Weights depend on the whole mini-batch, never on how it is cut into micro-batches or shared among
data-parallel ranks. Any cut therefore gives the same gradient (times ``num_ranks`` where gradients
are averaged over ranks)."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, TypeAlias, cast

import numpy as np
from jaxtyping import Float, Real

from pipeline.config.import_path import import_own, is_import_path
from pipeline.config.learning import Aggregation
from protocol.errors import ConfigError

ROW_EPSILON = 1e-8
"""Added to a row's token count in seq-mean-token-mean (verl)."""


OwnWeights: TypeAlias = Callable[[np.ndarray, float], Any]
"""A user's aggregation: takes ``num_loss_tokens`` and ``norm_length``, as :func:`row_weights` does."""


def row_weights(
    num_loss_tokens: Real[np.ndarray, " rows"], mode: Aggregation | str, *, norm_length: float = 1.0
) -> Float[np.ndarray, " rows"]:
    """Return the weight of every loss token of each row, float64.

    ``num_loss_tokens`` covers the whole mini-batch over all ranks (a row may be given another count
    than its number of loss tokens). ``mode`` is an :class:`Aggregation` or the import path of an
    :data:`OwnWeights`. Raises ValueError for an unknown mode or a ``norm_length`` that is not
    positive, and ConfigError when a user's function returns anything but finite weights of that
    shape."""
    if norm_length <= 0:
        raise ValueError(
            f"norm_length is {norm_length}; expected a positive length, such as the longest response allowed"
        )
    counts = np.asarray(num_loss_tokens, dtype=np.float64)
    present = (counts > 0).astype(np.float64)
    if is_import_path(mode):
        return _own_weights(mode, counts, norm_length) * present
    num_present = max(present.sum(), 1.0)
    match Aggregation(mode):
        case Aggregation.TOKEN_MEAN:
            return present / max(counts.sum(), 1.0)
        case Aggregation.SEQ_MEAN_TOKEN_MEAN:
            return present / (counts + ROW_EPSILON) / num_present
        case Aggregation.SEQ_MEAN_TOKEN_SUM:
            return present / num_present
        case Aggregation.SEQ_MEAN_TOKEN_SUM_NORM:
            return present / num_present / norm_length
        case Aggregation.TOKEN_SUM:
            return present


@cache
def _own(path: str) -> OwnWeights:
    found: Any = import_own("algorithm.loss_aggregation", path)
    if not callable(found):
        expected = "expected a function of num_loss_tokens and norm_length: name such a function"
        raise ConfigError(f"algorithm.loss_aggregation {path!r} is {found!r}; {expected}")
    return cast("OwnWeights", found)


def _own_weights(path: str, counts: Float[np.ndarray, " rows"], norm_length: float) -> Float[np.ndarray, " rows"]:
    own = _own(path)
    expected = f"expected {counts.size} finite weights, none below 0: correct the function"
    try:
        weights = np.asarray(own(counts, norm_length), dtype=np.float64)
    except Exception as error:
        failed = f"raised {type(error).__name__}: {error}"
        raise ConfigError(f"algorithm.loss_aggregation {path!r} {failed}; {expected}") from error
    if weights.shape != counts.shape or not np.isfinite(weights).all() or (weights < 0.0).any():
        got = f"returned {weights.tolist()!r:.80}"
        raise ConfigError(f"algorithm.loss_aggregation {path!r} {got}; {expected}")
    return weights
