"""Weights as a safetensors file: the bytes that travel from the learner to the generators.

*Consumes* named tensors. *Produces* a file, or the tensors of a file that was verified before. Reading maps the file: on one
host every generator shares the same pages. The file's metadata may hold a *probe*: a sequence, and what the learner thinks of
it, so that an engine can show that it computes the same.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from protocol.errors import WeightsRejected

_PROBE = "headrace.probe"


@dataclass(frozen=True, slots=True)
class Probe:
    """What the learner computes with the weights of a file."""

    tokens: np.ndarray
    """int32 [n]"""
    logprobs: np.ndarray
    """float32 [n - 1], of all tokens but the first, at the sampling temperature"""


class PublishedWeights(dict[str, torch.Tensor]):
    """Tensors by their Hugging Face names, and what came with them."""

    def __init__(
        self, tensors: Mapping[str, torch.Tensor], *, path: Path | None = None, probe: Probe | None = None
    ) -> None:
        """Take tensors, the file that they are mapped from, and the learner's probe; each of the two if there is one."""
        super().__init__(tensors)
        self.path = path
        self.probe = probe


def write_weights(
    path: Path, tensors: Iterable[tuple[str, torch.Tensor]], *, dtype: str, probe: Probe | None = None
) -> None:
    """Write tensors under their Hugging Face names, floating-point ones as ``dtype`` (``float32`` or ``bfloat16``)."""
    target: torch.dtype = getattr(torch, dtype)
    converted = {
        name: tensor.detach().to(dtype=target if tensor.is_floating_point() else tensor.dtype).contiguous()
        for name, tensor in tensors
    }
    metadata = None
    if probe is not None:
        metadata = {_PROBE: json.dumps({"tokens": probe.tokens.tolist(), "logprobs": probe.logprobs.tolist()})}
    save_file(converted, path, metadata)


def read_weights(path: Path) -> PublishedWeights:
    """Map a weight file. Raises WeightsRejected when it is not one, FileNotFoundError when it is gone."""
    try:
        with safe_open(path, "pt") as file:
            metadata: dict[str, str] = file.metadata() or {}
        tensors = load_file(path)
    except SafetensorError as error:
        raise WeightsRejected(f"{path} is not a safetensors file: {error}") from error
    probe = None
    if _PROBE in metadata:
        fields = json.loads(metadata[_PROBE])
        probe = Probe(np.array(fields["tokens"], np.int32), np.array(fields["logprobs"], np.float32))
    return PublishedWeights(tensors, path=path, probe=probe)
