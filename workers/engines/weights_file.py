"""Weights as a safetensors file: the bytes that travel from the learner to the generators.

*Consumes* named tensors. *Produces* a file, or the tensors of a file that was verified before. Reading maps the file: on one
host every generator shares the same pages.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from protocol.errors import WeightsRejected


def write_weights(path: Path, tensors: Iterable[tuple[str, torch.Tensor]], *, dtype: str) -> None:
    """Write tensors under their Hugging Face names, floating-point ones as ``dtype`` (``float32`` or ``bfloat16``)."""
    target: torch.dtype = getattr(torch, dtype)
    converted = {
        name: tensor.detach().to(dtype=target if tensor.is_floating_point() else tensor.dtype).contiguous()
        for name, tensor in tensors
    }
    save_file(converted, path)


def read_weights(path: Path) -> dict[str, torch.Tensor]:
    """Map a weight file. Raises WeightsRejected when it is not one, FileNotFoundError when it is gone."""
    try:
        return load_file(path)
    except SafetensorError as error:
        raise WeightsRejected(f"{path} is not a safetensors file: {error}") from error
