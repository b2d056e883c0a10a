"""The file format of a published version: safetensors, laid out for use in place.

    file = length of header u64 | header (JSON: name -> dtype, shape, data_offsets; __metadata__) padded | tensors

The header is padded to whole pages, so tensors begin on a page, and metadata seldom changes the file's size.
No torch: engines make their own arrays. Source of the format: github.com/huggingface/safetensors, README,
"Format"."""

from __future__ import annotations

import math
import os
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from protocol.arrays import Buffer
from protocol.errors import WeightsDamaged

ITEM_BYTES = {
    "F64": 8, "I64": 8, "U64": 8,
    "F32": 4, "I32": 4, "U32": 4,
    "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
    "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "C64": 8,
}  # fmt: skip
"""Bytes per number, by the format's names of types."""
BLOCK_BYTES = 1 << 19
"""Bytes of a tensor that are passed on at once: hashed and then copied, they are read from memory once."""
MAX_HEADER_BYTES = 100_000_000
"""The format's own limit."""

_LENGTH = struct.Struct("<Q")
_PAGE_BYTES = 4096
_METADATA = "__metadata__"


@dataclass(frozen=True, slots=True)
class TensorSpec:
    name: str
    dtype: str
    """``F32``, ``BF16`` ...: a key of ITEM_BYTES."""
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class PlacedTensor:
    spec: TensorSpec
    start: int
    """Offset of its first byte in the file."""


@dataclass(frozen=True, slots=True)
class Contents:
    tensors: tuple[PlacedTensor, ...]
    metadata: Mapping[str, str]
    head_bytes: int
    """Offset of the first tensor."""

    @property
    def stride(self) -> int:
        """Bytes per number in most of the body."""
        sizes: Counter[int] = Counter()
        for placed in self.tensors:
            sizes[ITEM_BYTES[placed.spec.dtype]] += placed.spec.num_bytes
        return max(sizes, key=lambda size: sizes[size], default=1)


@dataclass(frozen=True, slots=True)
class Publication:
    """A version to be written to a file; its size is known before its bytes."""

    head: bytes
    num_bytes: int
    """Size of the whole file."""
    blocks: Iterator[np.ndarray]
    """uint8 [bytes], in file order, after the head. Each is used before the next is taken."""
    begin: Callable[[Any], None] = lambda loan: None
    """Called with the loan (``pipeline.training.live_states``) under which the blocks are read on another
    thread, if they are the live weights: training waits for its end before it changes them."""
    digests: Callable[[], dict[str, bytes]] | None = None
    """Returns the digests of these weights (``TrainingBackend.digests``), under the loan, once the blocks are
    taken; None if nobody reads them there."""


class _Entry(msgspec.Struct, forbid_unknown_fields=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def in_order(specs: Iterable[TensorSpec]) -> list[TensorSpec]:
    """Return tensors in file order: the widest types first, so that every tensor is aligned."""
    return sorted(specs, key=lambda spec: (-ITEM_BYTES[spec.dtype], spec.name))


def publication(
    specs: Iterable[TensorSpec], blocks: Iterator[np.ndarray], metadata: Mapping[str, str] | None = None
) -> Publication:
    """Lay out a file of tensors in file order (:func:`in_order`); ``blocks`` yields their bytes."""
    header: dict[str, object] = {_METADATA: dict(metadata)} if metadata else {}
    end = 0
    for spec in specs:
        start, end = end, end + spec.num_bytes
        header[spec.name] = _Entry(spec.dtype, spec.shape, (start, end))
    text = msgspec.json.encode(header)
    size = -(-(_LENGTH.size + len(text)) // _PAGE_BYTES) * _PAGE_BYTES
    head = _LENGTH.pack(size - _LENGTH.size) + text.ljust(size - _LENGTH.size)
    return Publication(head, size + end, blocks)


def read_contents(data: Buffer | np.ndarray) -> Contents:
    """Return a file's tensors and metadata. Raises WeightsDamaged if it is not a safetensors file, or its
    tensors overlap or exceed it."""
    view = memoryview(data)  # pyright: ignore[reportArgumentType] -- numpy's stubs lack the protocol on 3.11
    return _contents(lambda begin, end: view[begin:end], len(view))


def read_head(path: Path) -> Contents:
    """Return a file's tensors and metadata, reading only its head. Raises WeightsDamaged, OSError."""
    with path.open("rb") as file:
        return _contents(lambda begin, end: file.read(end - begin), os.fstat(file.fileno()).st_size)


def _contents(read: Callable[[int, int], Buffer], num_bytes: int) -> Contents:
    """``read`` returns the bytes from ``begin`` to ``end``, and is called in file order."""
    if num_bytes < _LENGTH.size:
        raise WeightsDamaged(
            f"{num_bytes} bytes are not a safetensors file; it was truncated, or is another kind of file"
        )
    num_header = int.from_bytes(read(0, _LENGTH.size), "little")
    if num_header > min(MAX_HEADER_BYTES, num_bytes - _LENGTH.size):
        raise WeightsDamaged(
            f"a file of {num_bytes} bytes claims a header of {num_header} bytes; it was truncated, or is not a "
            f"safetensors file"
        )
    head_bytes = _LENGTH.size + num_header
    try:
        header = msgspec.json.decode(read(_LENGTH.size, head_bytes), type=dict[str, msgspec.Raw])
        raw_metadata = header.pop(_METADATA, None)
        metadata = {} if raw_metadata is None else msgspec.json.decode(raw_metadata, type=dict[str, str])
        entries = {name: msgspec.json.decode(raw, type=_Entry) for name, raw in header.items()}
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise WeightsDamaged(f"the header is not that of a safetensors file: {error}") from error
    tensors: list[PlacedTensor] = []
    end = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        if entry.dtype not in ITEM_BYTES or min(entry.shape, default=0) < 0:
            raise WeightsDamaged(
                f"tensor {name} has type {entry.dtype} and shape {entry.shape}; no such tensor is known"
            )
        spec = TensorSpec(name, entry.dtype, entry.shape)
        if entry.data_offsets != (end, end + spec.num_bytes):
            raise WeightsDamaged(
                f"tensor {name} of {spec.num_bytes} bytes lies at {entry.data_offsets}, expected {(end, end + spec.num_bytes)}"
            )
        tensors.append(PlacedTensor(spec, head_bytes + end))
        end += spec.num_bytes
    if head_bytes + end != num_bytes:
        raise WeightsDamaged(
            f"the tensors end at byte {head_bytes + end} of {num_bytes}; the file was truncated or has extra bytes"
        )
    return Contents(tuple(tensors), metadata, head_bytes)
