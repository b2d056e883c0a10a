"""Decides which optimiser steps are spikes (finite, but far above the steps before), and compares a
repeated step with the first. Pure.

A step is a spike if its loss (in magnitude) or gradient norm exceeds ``learner.spike_factor`` times
the median of the last ``WINDOW`` applied steps. Limits are fixed for a whole update. There are none
before ``LEAST`` applied steps, and none for a quantity whose median is 0."""

from __future__ import annotations

import math
import socket
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median
from typing import Final, Protocol

from protocol.errors import StepDiffered

WINDOW: Final = 64
"""Number of applied steps in the median."""
LEAST: Final = 16
"""Number of applied steps before any limit: the first steps of a run vary a lot."""


@dataclass(frozen=True, slots=True)
class StepLimits:
    """The largest loss and gradient norm of a step that may be applied."""

    loss: float = math.inf
    """In magnitude."""
    grad_norm: float = math.inf
    """Before clipping."""

    def allow(self, loss: float, grad_norm: float) -> bool:
        """Return whether a step may be applied: its numbers are finite and within the limits."""
        is_finite = math.isfinite(loss) and math.isfinite(grad_norm)
        return is_finite and abs(loss) <= self.loss and grad_norm <= self.grad_norm


NO_LIMITS: Final = StepLimits()
NO_STEP: Final = StepLimits(-1.0, -1.0)
"""Steps are computed but never applied."""


class RecentSteps:
    """The last applied steps, kept across restarts."""

    def __init__(self) -> None:
        self._steps: deque[tuple[float, float]] = deque(maxlen=WINDOW)

    def add(self, loss: float, grad_norm: float) -> None:
        self._steps.append((abs(loss), grad_norm))

    def limits(self, factor: float) -> StepLimits:
        """Return the limits of the next update's steps. A factor of 0 means no limit."""
        if not factor or len(self._steps) < LEAST:
            return NO_LIMITS
        losses, norms = zip(*self._steps, strict=True)
        return StepLimits(_above(factor, losses), _above(factor, norms))

    @property
    def state(self) -> tuple[tuple[float, float], ...]:
        """The steps to store in a checkpoint, oldest first."""
        return tuple(self._steps)

    def restore(self, state: Iterable[Iterable[float]]) -> None:
        self._steps.clear()
        for loss, grad_norm in state:
            self.add(loss, grad_norm)


def _above(factor: float, values: Iterable[float]) -> float:
    return factor * median(values) or math.inf


_SAME: Final = 1e-3
"""Relative difference that a device's order of additions may cause between equal steps."""


class StepNumbers(Protocol):
    """The numbers of a step that are compared."""

    @property
    def applied(self) -> bool:
        """Whether weights and optimiser were changed."""
        ...

    @property
    def loss(self) -> float: ...

    @property
    def grad_norm(self) -> float: ...


def check_same(first: StepNumbers, again: StepNumbers, *, applied: bool = False) -> None:
    """Raise StepDiffered, naming this host, unless a repeated step gives the same numbers as the
    first. ``applied`` is whether the repeat was meant to be applied."""
    pairs = ((first.loss, again.loss), (first.grad_norm, again.grad_norm))
    if again.applied is applied and all(_is_same(*pair) for pair in pairs):
        return
    # the host comes first: a truncated report keeps the start of the text
    raise StepDiffered(
        f"host {socket.gethostname()} has a faulty memory or device: a step had loss {first.loss:g} and gradient norm "
        f"{first.grad_norm:g}, but {again.loss:g} and {again.grad_norm:g} when repeated from the same state and samples; "
        "nothing was committed"
    )


def _is_same(first: float, again: float) -> bool:
    return (math.isnan(first) and math.isnan(again)) or math.isclose(first, again, rel_tol=_SAME)
