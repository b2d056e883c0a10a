"""How much more evidence a larger fleet needs: the more workers, the higher the largest by chance.

In a window of 15 minutes each healthy worker has a largest strength: evidence over its need. Above
``start`` lies a share of them, with an exponential tail. A fleet of N workers then has one above
``start + slope ln(share N / alpha)`` in a share alpha of windows."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

ALPHA: Final = 0.01
"""Share of benign windows of 15 minutes in which a fleet may blame a worker."""
SHARE: Final = 0.02
"""Share of the workers' largest strengths that the tail is fitted to."""


@dataclass(frozen=True, slots=True)
class Tail:
    """The tail of healthy workers' largest strengths."""

    start: float
    slope: float
    share: float = SHARE

    def strength(self, num_workers: int) -> float:
        """Return the strength that a fleet exceeds in a share ALPHA of windows."""
        return self.start + self.slope * max(0.0, math.log(self.share * num_workers / ALPHA))


def fit(strengths: NDArray[np.floating]) -> Tail:
    """Fit the tail to the largest strengths of healthy workers, one a worker and window.

    Raises ValueError for fewer than 100."""
    if len(strengths) < 100:
        raise ValueError(f"{len(strengths)} strengths of healthy workers; expected at least 100")
    ordered = np.sort(strengths)[::-1]
    above = ordered[: max(2, round(SHARE * len(ordered)))]
    start = float(above[-1])
    return Tail(start, float(np.mean(above) - start))


FITTED: Final = Tail(start=0.572, slope=0.143)
"""Of 512 healthy workers: benign development windows 0 and 1 of both synthetic fleets at 128
workers, by ``largest_strengths``. Few windows: a better fit needs hundreds."""


def fleet_factor(num_workers: int) -> float:
    """Return by which needs of a fleet exceed those of a small one; at least 1."""
    return max(1.0, FITTED.strength(num_workers))
