"""The seam between the value worker and its model's engines, which block its compute thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from workers.engines.scoring.seam import ScoringRequest

if TYPE_CHECKING:
    from pipeline.training.live_states import LiveState
    from pipeline.training.snapshots import KeptState


@dataclass(frozen=True, slots=True)
class ValueSample:
    """A finished response to regress on. R is the number of its tokens."""

    name: str
    """Trajectory, for error messages."""
    tokens: np.ndarray
    """int32 [prompt + response]"""
    prompt_length: int
    """Tokens before the first response token; at least 1."""
    old_values: np.ndarray
    """float32 [R]: values when sampled, window by window; new values are clipped around them."""
    reward: float
    """Of the whole response, received at its last token."""

    @property
    def response_length(self) -> int:
        """R."""
        return int(self.tokens.size - self.prompt_length)


@dataclass(frozen=True, slots=True)
class ValueStepResult:
    """The result of one optimiser step of the value model."""

    applied: bool
    """False when loss or gradient was not finite: weights and optimiser are then unchanged."""
    loss: float
    explained_variance: float
    """``1 - Var(R - V) / Var(R)`` with values from before the step, so on new responses."""
    clip_fraction: float
    """Share of the loss's weight on tokens where the clipped error was the larger."""
    value_mean: float
    target_mean: float
    """Means over the batch: of each response's tokens, then of responses."""
    grad_norm: float
    learning_rate: float
    num_tokens: int
    """Prompt and response tokens that went through the model."""


class ValueEngine(Protocol):
    """Owns the value model and its optimiser."""

    def values(self, requests: Sequence[ScoringRequest]) -> list[np.ndarray]:
        """Return, for each request, float32 [num_scored]: V before each token of the tail."""
        ...

    def step(self, samples: Sequence[ValueSample]) -> ValueStepResult:
        """Do one optimiser step on the whole of ``samples``, in micro-batches by token budget.
        Every response weighs the same, over the number of responses of the whole batch, so
        micro-batching changes nothing."""
        ...

    def snapshot(self) -> Callable[[Path], None]:
        """Copy the state of an exact resume; return its writer, as ``TrainingBackend.snapshot``."""
        ...

    def load(self, folder: Path) -> None:
        """Take back a snapshot. Raises DataError naming the file that is missing or damaged."""
        ...

    def live_state(self) -> LiveState:
        """Return the state of an exact resume where it lies, to be lent, as
        ``TrainingBackend.live_state``."""
        ...

    def put_back(self, kept: KeptState) -> None:
        """Take back a copied ``live_state``. On DataError nothing has changed."""
        ...

    def close(self) -> None:
        """Release resources outside this process: other ranks end."""
        ...
