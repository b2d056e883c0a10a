"""Claims about a version's bytes: other readers of safetensors agree; other files are refused."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save

from pipeline.weights.store import write_publication
from pipeline.weights.tensorfile import BLOCK_BYTES, TensorSpec, in_order, publication, read_contents, read_head
from protocol.errors import WeightsDamaged

TENSORS = {
    "b.wide": np.arange(6, dtype=np.int64).reshape(2, 3),
    "a": np.linspace(0, 1, 5, dtype=np.float32),
    "empty": np.empty((0, 4), np.float32),
    "scalar": np.array(3.5, np.float32),
    "bytes": np.arange(7, dtype=np.uint8),
}
NAMES = {np.dtype(np.int64): "I64", np.dtype(np.float32): "F32", np.dtype(np.uint8): "U8"}


def file_of(tensors: dict[str, np.ndarray], metadata: dict[str, str] | None = None) -> np.ndarray:
    specs = in_order(TensorSpec(name, NAMES[tensor.dtype], tensor.shape) for name, tensor in tensors.items())
    blocks = (tensors[spec.name].reshape(-1).view(np.uint8) for spec in specs)
    made = publication(specs, blocks, metadata)
    data = np.empty(made.num_bytes, np.uint8)
    write_publication(data, made)
    return data


def test_safetensors_itself_reads_what_is_written_and_finds_every_tensor_aligned(tmp_path: Path) -> None:
    data = file_of(TENSORS, {"note": "x"})
    path = tmp_path / "w.safetensors"
    path.write_bytes(data.tobytes())
    found = load_file(path)
    assert found.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        np.testing.assert_array_equal(found[name], tensor)
    contents = read_contents(data)
    assert contents.metadata == {"note": "x"}
    assert contents.head_bytes % 4096 == 0
    for placed in contents.tensors:
        assert placed.start % TENSORS[placed.spec.name].dtype.itemsize == 0


def test_what_safetensors_writes_is_read() -> None:
    contents = read_contents(save(TENSORS))
    assert {placed.spec.name: placed.spec.shape for placed in contents.tensors} == {
        name: tensor.shape for name, tensor in TENSORS.items()
    }
    assert contents.stride == 8


def test_a_head_alone_says_what_the_whole_file_does_and_a_cut_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(save(TENSORS))
    assert read_head(path) == read_contents(path.read_bytes())
    for kept in (0, 4, 20, path.stat().st_size - 1):
        (tmp_path / "cut").write_bytes(path.read_bytes()[:kept])
        with pytest.raises(WeightsDamaged, match="truncated"):
            read_head(tmp_path / "cut")


@given(st.binary(max_size=200))
def test_bytes_that_are_no_file_are_refused(data: bytes) -> None:
    with pytest.raises(WeightsDamaged):
        read_contents(data)


def _with_header(header: Any, body: int = 8) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(body)


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]},
        {"dtype": "F32", "shape": [3], "data_offsets": [0, 12]},
        {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [-2], "data_offsets": [0, -8]},
        {"dtype": "F99", "shape": [2], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], "more": 1},
        {"dtype": "F32", "shape": "2", "data_offsets": [0, 8]},
        3,
    ],
)
def test_tensors_that_overlap_leave_holes_or_lie_outside_are_refused(entry: object) -> None:
    read_contents(_with_header({"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}))
    with pytest.raises(WeightsDamaged):
        read_contents(_with_header({"x": entry}))


def test_a_header_that_claims_more_than_there_is_is_refused_before_it_is_read() -> None:
    with pytest.raises(WeightsDamaged, match="claims a header"):
        read_contents(struct.pack("<Q", 2**63) + bytes(100))


def test_a_publication_that_yields_less_than_it_said_is_an_error() -> None:
    made = publication([TensorSpec("x", "U8", (2 * BLOCK_BYTES,))], iter([np.zeros(BLOCK_BYTES, np.uint8)]))
    with pytest.raises(ValueError, match="yielded"):
        write_publication(np.empty(made.num_bytes, np.uint8), made)
