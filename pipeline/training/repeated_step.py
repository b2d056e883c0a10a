"""Compares a refused optimiser step with its repeat: the same result, or a machine at fault."""

from __future__ import annotations

import math
import socket
from typing import Final, Protocol

from protocol.errors import StepDiffered

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
