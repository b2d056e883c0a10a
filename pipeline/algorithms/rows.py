"""Sums, means and maxima over the tokens of each row of a packed batch.

A row is a whole response. Packing keeps rows whole, so these results do not depend on how a batch
is cut."""

from __future__ import annotations

from typing import TypeAlias

from jaxtyping import Bool, Float, Int
from torch import Tensor

Tokens: TypeAlias = Float[Tensor, " tokens"]
"""A number for each token of a packed batch."""
Mask: TypeAlias = Bool[Tensor, " tokens"]
Ints: TypeAlias = Int[Tensor, " tokens"]
Floats: TypeAlias = Float[Tensor, "*tokens"]
"""Numbers of tokens, laid out in any shape."""
Flags: TypeAlias = Bool[Tensor, "*tokens"]


def row_sum(values: Tokens, mask: Mask, row_ids: Ints, num_rows: int) -> Float[Tensor, " rows"]:
    """Sum ``values`` over the tokens of each row where the mask is set; 0 for a row without any."""
    return values.new_zeros(num_rows).index_add(0, row_ids, values.where(mask, values.new_zeros(())))


def row_counts(mask: Mask, row_ids: Ints, num_rows: int) -> Int[Tensor, " rows"]:
    """Count the tokens of each row where the mask is set."""
    return row_ids.new_zeros(num_rows).index_add(0, row_ids, mask.to(row_ids.dtype))


def row_mean(values: Tokens, mask: Mask, row_ids: Ints, num_rows: int) -> Float[Tensor, " rows"]:
    """Average ``values`` over each row's tokens where the mask is set; 0 for a row without any."""
    counts = row_counts(mask, row_ids, num_rows).clamp(min=1)
    return row_sum(values, mask, row_ids, num_rows) / counts.to(values.dtype)


def row_max(values: Tokens, mask: Mask, row_ids: Ints, num_rows: int) -> Float[Tensor, " rows"]:
    """Take each row's largest of ``values`` on the mask, else -inf. Not differentiable."""
    lowest = values.new_full((), float("-inf"))
    return lowest.repeat(num_rows).scatter_reduce(0, row_ids, values.detach().where(mask, lowest), reduce="amax")
