"""Types of numbers per token, and sums over the rows of a packed batch."""

from __future__ import annotations

from typing import TypeAlias

from jaxtyping import Bool, Float, Int
from torch import Tensor

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
