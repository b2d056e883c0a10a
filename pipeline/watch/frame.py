"""A frame: the metrics of all workers of a fleet at one moment."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Frame:
    """One moment of a fleet. Nothing of it is changed once it is made."""

    time_s: float
    """By the reader's clock; grows from frame to frame."""
    workers: tuple[str, ...]
    """Names, each once. The same object as long as the fleet is the same."""
    roles: tuple[str, ...]
    """Of each worker. Workers are compared inside a role only."""
    metrics: tuple[str, ...]
    """Names, each once, of the catalogue or any others."""
    values: NDArray[np.float32]
    """[workers, metrics]. NaN: no sample. Infinity: a sample that is no finite number."""
    phases: tuple[str, ...] | None = None
    """Of each worker; workers are then compared inside a role and phase."""
    expected_s: NDArray[np.float32] | None = None
    """[workers] How long each one's present work may stand, by its own past."""
