"""Versions of weights for tests: numbers, the publications that hold them, and the effect of an
optimiser's step."""

from __future__ import annotations

import numpy as np

from pipeline.weights.tensorfile import Publication, TensorSpec, publication


def numbers(seed: int, count: int = 100_000) -> np.ndarray:
    """uint16 [count]: bf16 patterns of normal numbers."""
    drawn = np.random.default_rng(seed).normal(0.0, 0.02, count).astype(np.float32)
    return (drawn.view(np.uint32) >> 16).astype(np.uint16)


def stepped(before: np.ndarray, seed: int, share: float = 0.03) -> np.ndarray:
    """The same numbers, ``share`` of them moved by one unit in the last place."""
    rng = np.random.default_rng(seed)
    moves = rng.choice(np.array([-1, 0, 1]), before.size, p=[share / 2, 1 - share, share / 2])
    return (before.astype(np.int64) + moves).astype(np.uint16)


def published(patterns: np.ndarray, *, note: str = "") -> Publication:
    """One bf16 tensor; ``note`` goes into the metadata."""
    spec = TensorSpec("weight", "BF16", (patterns.size,))
    return publication([spec], iter([patterns.view(np.uint8)]), {"note": note} if note else None)
