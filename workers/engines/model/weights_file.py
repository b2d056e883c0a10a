"""Published weights as tensors: the bytes that travel to the generators, and into an engine.

The file's metadata may hold a *probe*: a sequence and the learner's log-probs of it. An engine
shows by it that it computes the same."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import torch

from pipeline.weights.tensorfile import (
    BLOCK_BYTES,
    ITEM_BYTES,
    Publication,
    TensorSpec,
    in_order,
    publication,
    read_contents,
)
from protocol.errors import WeightsDamaged, WeightsRejected

_PROBE = "headrace.probe"
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


@dataclass(frozen=True, slots=True)
class ParityProbe:
    """The learner's log-probs of a fixed sequence, with the weights of a file."""

    tokens: np.ndarray
    """int32 [n]"""
    logprobs: np.ndarray
    """float32 [n - 1], of all tokens but the first, at the sampling temperature"""


class _StoredProbe(msgspec.Struct):
    tokens: list[int]
    logprobs: list[float]


class PublishedWeights(dict[str, torch.Tensor]):
    """Tensors by their Hugging Face names, with their file's properties."""

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        *,
        path: Path | None = None,
        probe: ParityProbe | None = None,
        is_lasting: bool = False,
    ) -> None:
        """Take tensors by name, and their file if other processes of this host may map it.

        ``is_lasting``: their bytes stay unchanged while they are served, so that an engine may use
        them where they lie, instead of a copy."""
        super().__init__(tensors)
        self.path = path
        self.probe = probe
        self.is_lasting = is_lasting


def publish_tensors(
    tensors: Iterable[tuple[str, torch.Tensor]], *, dtype: str, probe: ParityProbe | None = None
) -> Publication:
    """Lay out tensors by Hugging Face names, floating-point ones as ``float32`` or ``bfloat16``.
    Tensors are read while the publication is written, so they must not change before."""
    named = dict(tensors)
    specs = [spec_of(name, tensor, getattr(torch, dtype)) for name, tensor in named.items()]
    return lay_out(specs, named.__getitem__, probe_metadata(probe))


def spec_of(name: str, tensor: torch.Tensor, floating: torch.dtype) -> TensorSpec:
    """Return how a tensor is written: as ``floating`` if it has such numbers, else as it is."""
    dtype = floating if tensor.is_floating_point() else tensor.dtype
    return TensorSpec(name, _NAMES[dtype], tuple(tensor.shape))


def torch_type(spec: TensorSpec) -> torch.dtype:
    """Return the type of a tensor's numbers. Raises KeyError for one that torch has not."""
    return _DTYPES[spec.dtype]


def lay_out(
    specs: Iterable[TensorSpec], make: Callable[[str], torch.Tensor], metadata: Mapping[str, str] | None = None
) -> Publication:
    """Lay out tensors that ``make`` returns, once each as they are written, cast to their spec."""
    ordered = in_order(specs)
    return publication(ordered, _blocks(ordered, make), metadata)


def probe_metadata(probe: ParityProbe | None) -> dict[str, str]:
    """Return the metadata that hold a probe, if there is one."""
    if probe is None:
        return {}
    return {_PROBE: msgspec.json.encode(_StoredProbe(probe.tokens.tolist(), probe.logprobs.tolist())).decode()}


def view_weights(data: np.ndarray, *, path: Path | None = None, is_lasting: bool = False) -> PublishedWeights:
    """Return the tensors in a file's writable uint8 bytes, without a copy, or WeightsDamaged."""
    contents = read_contents(data)
    tensors = {
        placed.spec.name: torch.frombuffer(
            data, dtype=_DTYPES[placed.spec.dtype], count=placed.spec.num_bytes // ITEM_BYTES[placed.spec.dtype],
            offset=placed.start,
        ).view(placed.spec.shape)
        if placed.spec.num_bytes
        else torch.empty(placed.spec.shape, dtype=_DTYPES[placed.spec.dtype])
        for placed in contents.tensors
    }  # fmt: skip
    probe = None
    if _PROBE in contents.metadata:
        try:
            stored = msgspec.json.decode(contents.metadata[_PROBE], type=_StoredProbe)
        except (ValueError, RecursionError) as error:
            raise WeightsDamaged(f"the probe beside the weights cannot be read: {error}") from error
        probe = ParityProbe(np.array(stored.tokens, np.int32), np.array(stored.logprobs, np.float32))
    return PublishedWeights(tensors, path=path, probe=probe, is_lasting=is_lasting)


def read_weights(path: Path) -> PublishedWeights:
    """Map a weight file. Raises WeightsRejected when it is none, FileNotFoundError when gone."""
    with path.open("rb") as file:
        try:
            pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except ValueError as error:
            # of an empty file
            raise WeightsRejected(f"{path} is not a safetensors file: {error}") from error
    try:
        return view_weights(np.frombuffer(pages, np.uint8), path=path)
    except WeightsDamaged as error:
        raise WeightsRejected(f"{path} is not a safetensors file: {error}") from error


def write_weights(
    path: Path, tensors: Iterable[tuple[str, torch.Tensor]], *, dtype: str, probe: ParityProbe | None = None
) -> None:
    """Write tensors into a file of their own; see :func:`publish_tensors`."""
    written = publish_tensors(tensors, dtype=dtype, probe=probe)
    with path.open("wb") as file:
        file.write(written.head)
        file.writelines(block.data for block in written.blocks)


def _blocks(specs: Iterable[TensorSpec], make: Callable[[str], torch.Tensor]) -> Iterator[np.ndarray]:
    """Yield tensors' bytes in blocks: views where the type fits, else a block cast at a time."""
    for spec in specs:
        dtype = _DTYPES[spec.dtype]
        flat = make(spec.name).detach().contiguous().reshape(-1)
        if flat.dtype == dtype:
            data = flat.view(torch.uint8).numpy()
            for start in range(0, data.size, BLOCK_BYTES):
                yield data[start : start + BLOCK_BYTES]
        else:
            num_items = BLOCK_BYTES // ITEM_BYTES[spec.dtype]
            scratch = torch.empty(min(num_items, flat.numel()), dtype=dtype)
            for piece in flat.split(num_items):
                yield scratch[: piece.numel()].copy_(piece).view(torch.uint8).numpy()
