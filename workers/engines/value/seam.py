"""The interface between the value worker and its engines, whose calls block the worker's compute
thread."""

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
    """A finished response to regress on. R is its number of sampled tokens, which have values; others are
    the environment's."""

    name: str
    """The trajectory, for error messages."""
    tokens: np.ndarray
    prompt_length: int
    """Tokens before the first response token; at least 1."""
    old_values: np.ndarray
    """float32 [R]: values at sampling time, window by window; new values are clipped around them."""
    reward: float
    """Of the whole response, received at its last token."""
    places: np.ndarray | None = None
    """int64 [R]: indices of the sampled tokens, the first ``prompt_length``; None if all after the prompt."""

    @property
    def response_length(self) -> int:
        """R."""
        return int(self.old_values.size)

    @property
    def scored(self) -> np.ndarray:
        """int64 [R]: indices of the sampled tokens."""
        return np.arange(self.prompt_length, self.tokens.size) if self.places is None else self.places


@dataclass(frozen=True, slots=True)
class ValueStepResult:
    applied: bool
    """False when loss or gradient was not finite; then nothing changed."""
    loss: float
    explained_variance: float
    """``1 - Var(R - V) / Var(R)`` with values from before the step, so on unseen responses."""
    clip_fraction: float
    """Share of the loss's weight on tokens whose clipped error was larger."""
    value_mean: float
    target_mean: float
    """Both average over each response's tokens, then over responses."""
    grad_norm: float
    learning_rate: float
    num_tokens: int


class ValueEngine(Protocol):
    def values(self, requests: Sequence[ScoringRequest]) -> list[np.ndarray]:
        """Return float32 [num_scored] for each request: V before each token of the tail."""
        ...

    def step(self, samples: Sequence[ValueSample]) -> ValueStepResult:
        """Take one optimiser step on all of ``samples``, in micro-batches by token budget.

        Every response of the whole batch weighs the same, so micro-batching changes nothing."""
        ...

    def snapshot(self) -> Callable[[Path], None]:
        """See ``TrainingBackend.snapshot``."""
        ...

    def load(self, folder: Path) -> None: ...

    def live_state(self) -> LiveState:
        """See ``TrainingBackend.live_state``."""
        ...

    def put_back(self, kept: KeptState) -> None: ...

    def close(self) -> None: ...
