"""Emulated weights: one small tensor that travels the whole way of real ones.

*Consumes* and *produces* safetensors files in numpy. *Waits for* the disk.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file
from xxhash import xxh3_128_digest

from protocol.errors import WeightsRejected

TENSOR = "emulated.weight"


def make_tensor(digest: str, num_weights: int) -> np.ndarray:
    """Return float32 [num_weights], a function of a hexadecimal digest."""
    key = int(digest[:16] or "0", 16)
    return np.random.Generator(np.random.Philox(key=key)).standard_normal(num_weights, dtype=np.float32)


def write_weights(path: Path, tensors: Iterable[tuple[str, np.ndarray]]) -> None:
    """Write tensors under their names."""
    save_file(dict(tensors), path)


def digest_tensors(tensors: Iterable[tuple[str, np.ndarray]]) -> dict[str, bytes]:
    """Return xxh3-128 of each tensor's bytes, by name."""
    return {name: xxh3_128_digest(tensor.tobytes()) for name, tensor in tensors}


def read_weights(path: Path) -> dict[str, np.ndarray]:
    """Read a weight file. Raises WeightsRejected when it is not one, FileNotFoundError when it is gone."""
    try:
        return load_file(path)
    except SafetensorError as error:
        raise WeightsRejected(f"{path} is not a safetensors file: {error}") from error


def check_tensors(tensors: Mapping[str, Any], num_weights: int) -> None:
    """Raise WeightsRejected unless ``tensors`` are what :func:`make_tensor` makes."""
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if found != {TENSOR: (num_weights,)}:
        raise WeightsRejected(
            f"published weights are {found}, expected {TENSOR} of shape {(num_weights,)}; learner and generators must be "
            "emulated alike"
        )
