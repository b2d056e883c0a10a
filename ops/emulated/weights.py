"""Emulated weights: one small numpy tensor that is published like real weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from xxhash import xxh3_128_digest

from pipeline.weights.tensorfile import Publication, TensorSpec, publication, read_contents
from protocol.errors import WeightsRejected

TENSOR = "emulated.weight"


def make_tensor(digest: str, num_weights: int) -> np.ndarray:
    """Return float32 [num_weights], a function of a hexadecimal digest."""
    key = int(digest[:16] or "0", 16)
    return np.random.Generator(np.random.Philox(key=key)).standard_normal(num_weights, dtype=np.float32)


def publish_tensors(tensors: Iterable[tuple[str, np.ndarray]]) -> Publication:
    named = list(tensors)
    specs = [TensorSpec(name, "F32", tensor.shape) for name, tensor in named]
    return publication(specs, (np.ascontiguousarray(tensor).reshape(-1).view(np.uint8) for _, tensor in named))


def digest_tensors(tensors: Iterable[tuple[str, np.ndarray]]) -> dict[str, bytes]:
    """Return xxh3-128 of each tensor's bytes, by name."""
    return {name: xxh3_128_digest(tensor.tobytes()) for name, tensor in tensors}


def view_weights(data: np.ndarray) -> dict[str, np.ndarray]:
    """Return the tensors in a version's bytes. Raises WeightsDamaged if it cannot read them."""
    return {
        placed.spec.name: np.frombuffer(data, np.float32, placed.spec.num_bytes // 4, placed.start).reshape(
            placed.spec.shape
        )
        for placed in read_contents(data).tensors
    }


def check_tensors(tensors: Mapping[str, Any], num_weights: int) -> None:
    """Raise WeightsRejected unless ``tensors`` are those of :func:`make_tensor`."""
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if found != {TENSOR: (num_weights,)}:
        raise WeightsRejected(
            f"published weights are {found}, expected {TENSOR} of shape {(num_weights,)}; learner and generators must be "
            "emulated alike"
        )
