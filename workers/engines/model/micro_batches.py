"""Cuts samples into micro-batches, and computes each one's share of the work."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from protocol.errors import EngineError

Plan = Sequence[Sequence[int]]
"""Micro-batches, each as indices into the samples. An empty one is a forward and backward pass that
counts for nothing: where ranks compute together, all of them must make the same number."""

Backward = Callable[[torch.Tensor, torch.Tensor | None], None]
"""Given the loss of a micro-batch, adds its gradient to the parameters'. The second argument comes
with the last micro-batch: the sum of all losses of this rank, detached."""


def share_of_plan(plan: Plan, indices: Sequence[int], lengths: Sequence[int]) -> float:
    """Return a micro-batch's share of ``plan``, by tokens; an empty one counts for nothing."""
    everything = sum(lengths[index] for micro in plan for index in micro)
    return sum(lengths[index] for index in indices) / max(1, everything)


@contextmanager
def memory_errors(micro_batch_tokens: int, advice: str) -> Iterator[None]:
    """Raise EngineError, with the settings to change, when a device has no memory left."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise EngineError(
            f"no device memory for micro-batches of {micro_batch_tokens} tokens: {error}; {advice}"
        ) from error
