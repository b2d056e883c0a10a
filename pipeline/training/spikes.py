"""Which optimiser steps are spikes (finite, but far above the steps before them), and the check of a
repeated step. Pure.

A step is a spike when the magnitude of its loss, or its gradient's norm, is above a limit:
``learner.spike_factor`` times the median of the last ``WINDOW`` applied steps. The limits are fixed
for a whole update. There are none before ``LEAST`` applied steps, and none for a number whose median
is 0."""

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
"""Applied steps whose median is taken."""
LEAST: Final = 16
"""Applied steps before which no step is a spike: the first ones of a run differ much."""


@dataclass(frozen=True, slots=True)
class StepLimits:
    """The most that an optimiser step may have."""

    loss: float = math.inf
    """In magnitude."""
    grad_norm: float = math.inf
    """Before it is scaled down."""

    def allow(self, loss: float, grad_norm: float) -> bool:
        """Return whether a step with these numbers may be applied: finite, and within limits."""
        is_finite = math.isfinite(loss) and math.isfinite(grad_norm)
        return is_finite and abs(loss) <= self.loss and grad_norm <= self.grad_norm


NO_LIMITS: Final = StepLimits()
"""Every finite step is applied."""
NO_STEP: Final = StepLimits(-1.0, -1.0)
"""No step is applied: it is computed, and refused."""


class RecentSteps:
    """The last applied steps, over restarts."""

    def __init__(self) -> None:
        self._steps: deque[tuple[float, float]] = deque(maxlen=WINDOW)

    def add(self, loss: float, grad_norm: float) -> None:
        """Take an applied step."""
        self._steps.append((abs(loss), grad_norm))

    def limits(self, factor: float) -> StepLimits:
        """Return what the next update's steps may have; ``factor`` 0 for no limit."""
        if not factor or len(self._steps) < LEAST:
            return NO_LIMITS
        losses, norms = zip(*self._steps, strict=True)
        return StepLimits(_above(factor, losses), _above(factor, norms))

    @property
    def state(self) -> tuple[tuple[float, float], ...]:
        """The steps as a checkpoint keeps them, oldest first."""
        return tuple(self._steps)

    def restore(self, state: Iterable[Iterable[float]]) -> None:
        """Go on from a checkpoint's ``state``."""
        self._steps.clear()
        for loss, grad_norm in state:
            self.add(loss, grad_norm)


def _above(factor: float, values: Iterable[float]) -> float:
    return factor * median(values) or math.inf


_SAME: Final = 1e-3
"""Relative difference of two finite results that a device's order of additions may make."""


class StepNumbers(Protocol):
    """A step's result, as far as it is compared."""

    @property
    def applied(self) -> bool:
        """Whether weights and optimiser were changed."""
        ...

    @property
    def loss(self) -> float:
        """Its loss."""
        ...

    @property
    def grad_norm(self) -> float:
        """Norm of its gradient."""
        ...


def check_same(first: StepNumbers, again: StepNumbers, *, applied: bool = False) -> None:
    """Raise StepDiffered, which names this host, unless a refused step had the same numbers again.
    ``applied``: whether the repeat was to be applied."""
    pairs = ((first.loss, again.loss), (first.grad_norm, again.grad_norm))
    if again.applied is applied and all(_is_same(*pair) for pair in pairs):
        return
    # a report at the departure keeps the beginning
    raise StepDiffered(
        f"host {socket.gethostname()} is not sound, its memory or a device: a step had loss {first.loss:g} and gradient "
        f"norm {first.grad_norm:g}, and when it was made again from the same state and samples {again.loss:g} and "
        f"{again.grad_norm:g}; nothing was committed"
    )


def _is_same(first: float, again: float) -> bool:
    return (math.isnan(first) and math.isnan(again)) or math.isclose(first, again, rel_tol=_SAME)
