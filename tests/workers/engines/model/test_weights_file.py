"""Claims about tensors and their bytes: other readers agree, casts are torch's, and lasting bytes
are used in place."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from pipeline.weights.store import write_publication
from protocol.errors import WeightsRejected
from tests.workers.engines.tiny import tiny_model
from workers.engines.generation.local.dense import replace_weights
from workers.engines.model.weights_file import (
    ParityProbe,
    PublishedWeights,
    publish_tensors,
    read_weights,
    view_weights,
)

TENSORS = {
    "wide": torch.randn(1000, 700),
    "turned": torch.randn(30, 20).T,
    "small": torch.randn(3).to(torch.bfloat16),
    "count": torch.arange(7),
    "flags": torch.tensor([True, False, True]),
    "scalar": torch.tensor(2.5),
    "none": torch.empty(0, 4),
}


def bytes_of(tensors: dict[str, torch.Tensor], dtype: str, probe: ParityProbe | None = None) -> np.ndarray:
    publication = publish_tensors(tensors.items(), dtype=dtype, probe=probe)
    data = np.empty(publication.num_bytes, np.uint8)
    write_publication(data, publication)
    return data


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_published_tensors_are_read_by_safetensors_and_by_us_cast_as_torch_casts(tmp_path: Path, dtype: str) -> None:
    data = bytes_of(TENSORS, dtype)
    path = tmp_path / "w.safetensors"
    path.write_bytes(data.tobytes())
    for found in (load_file(path), view_weights(data), read_weights(path)):
        assert found.keys() == TENSORS.keys()
        for name, tensor in TENSORS.items():
            wanted = tensor.to(getattr(torch, dtype)) if tensor.is_floating_point() else tensor
            assert found[name].dtype == wanted.dtype
            assert torch.equal(found[name], wanted), name


def test_a_probe_comes_back_as_it_was() -> None:
    probe = ParityProbe(np.array([3, 1, 4], np.int32), np.array([-0.1, -2.7182817], np.float32))
    found = view_weights(bytes_of(TENSORS, "float32", probe)).probe
    assert found is not None
    np.testing.assert_array_equal(found.tokens, probe.tokens)
    np.testing.assert_array_equal(found.logprobs, probe.logprobs)


def test_a_file_that_is_no_safetensors_file_is_refused_and_a_missing_one_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "w"
    for content in (b"", b"no", bytes(100)):
        path.write_bytes(content)
        with pytest.raises(WeightsRejected, match="not a safetensors file"):
            read_weights(path)
    with pytest.raises(FileNotFoundError):
        read_weights(tmp_path / "gone")


def test_weights_that_last_are_used_where_they_lie_and_others_are_copied() -> None:
    model = tiny_model()
    published = {name: torch.randn_like(tensor) for name, tensor in model.state_dict().items()}
    published = {name: tensor for name, tensor in published.items() if name != "lm_head.weight" or not _is_tied(model)}
    data = bytes_of(published, "float32")
    start = data.ctypes.data

    def lies_there(name: str) -> bool:
        return start <= model.state_dict()[name].data_ptr() < start + data.size

    replace_weights(model, view_weights(data))
    assert not any(map(lies_there, published))
    replace_weights(model, view_weights(data, is_lasting=True))
    assert all(map(lies_there, published))
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in published.items())
    if _is_tied(model):
        assert model.lm_head.weight is model.get_input_embeddings().weight
    half = model.bfloat16()
    replace_weights(half, view_weights(data, is_lasting=True))
    assert not any(map(lies_there, published)), "another type is cast, which is a copy"


def test_a_model_is_as_it_was_when_lasting_weights_do_not_fit() -> None:
    model = tiny_model()
    before = {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}
    published = PublishedWeights({"stranger": torch.zeros(3)}, is_lasting=True)
    with pytest.raises(WeightsRejected, match="stranger"):
        replace_weights(model, published)
    assert {name: tensor.data_ptr() for name, tensor in model.state_dict().items()} == before


def _is_tied(model: torch.nn.Module) -> bool:
    return bool(getattr(model.config, "tie_word_embeddings", False))
