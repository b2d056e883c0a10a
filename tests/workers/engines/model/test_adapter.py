"""Claims about adapters that travel alone: merged where they arrive, they equal the learner's whole
publication."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from pipeline.weights.digest import PART_BYTES, digest_buffer, table_bytes
from pipeline.weights.store import write_publication
from pipeline.weights.tensorfile import Publication
from protocol.errors import WeightsDamaged, WeightsRejected
from tests.workers.engines.adapters import make_adapter, merged
from tests.workers.engines.tiny import tiny_model
from workers.engines.model.adapter import Adapter, publish_adapter, publish_base, publish_merged
from workers.engines.model.weights_file import ParityProbe, publish_tensors, view_weights

PROBE = ParityProbe(np.array([3, 1, 4], np.int32), np.array([-0.1, -2.7182817], np.float32))


def bytes_of(publication: Publication) -> np.ndarray:
    data = np.empty(publication.num_bytes, np.uint8)
    write_publication(data, publication)
    return data


def merged_bytes(adapter: np.ndarray, base: np.ndarray, dtype: str = "float32") -> np.ndarray:
    return bytes_of(publish_merged(adapter, base, digest_buffer(base), dtype=dtype))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tied", [True, False])
def test_merged_on_arrival_is_the_file_of_the_merged_weights_bit_for_bit(dtype: str, tied: bool) -> None:
    model = tiny_model(tie_word_embeddings=tied)
    base = bytes_of(publish_base(make_adapter(model), dtype=dtype))
    for seed in range(3):
        adapter = make_adapter(model, seed=seed)
        arrived = bytes_of(publish_adapter(adapter, digest_buffer(base), probe=PROBE))
        whole = bytes_of(publish_tensors(merged(adapter).items(), dtype=dtype, probe=PROBE))
        assert np.array_equal(merged_bytes(arrived, base, dtype), whole)


def test_an_adapter_is_a_small_share_of_the_weights_and_is_not_rounded() -> None:
    model = tiny_model(hidden_size=256, intermediate_size=512)
    adapter = make_adapter(model)
    base = bytes_of(publish_base(adapter, dtype="bfloat16"))
    file = bytes_of(publish_adapter(adapter, digest_buffer(base)))
    assert file.size < base.size / 20
    found = view_weights(file)
    for layer, (a, b) in adapter.layers.items():
        assert torch.equal(found[f"{layer}.lora_A.weight"], a)
        assert torch.equal(found[f"{layer}.lora_B.weight"], b)


def test_a_version_is_its_factors_and_at_most_a_hundredth_more() -> None:
    # SmolLM2 135M: 30 blocks with these linear layers [rows, columns]
    shapes = [(576, 576), (192, 576), (192, 576), (576, 576), (1536, 576), (1536, 576), (576, 1536)]
    layers = {
        f"model.layers.{block}.self_attn.{number}_proj": (torch.zeros(16, columns), torch.zeros(rows, 16))
        for block in range(30)
        for number, (rows, columns) in enumerate(shapes)
    }
    adapter = Adapter(layers, 2.0, below=list)
    digests = table_bytes(size := publish_adapter(adapter, "xxh3-128:" + "0" * 32).num_bytes, PART_BYTES, "xxh3-128")
    assert size + digests < 1.01 * sum(tensor.nbytes for tensor in adapter.parts.values())


def test_of_the_base_only_what_is_added_to_keeps_a_type_that_does_not_round_it() -> None:
    model = tiny_model()
    found = view_weights(bytes_of(publish_base(make_adapter(model), dtype="bfloat16")))
    for name, tensor in found.items():
        assert tensor.dtype == (torch.float32 if name.endswith("_proj.weight") else torch.bfloat16), name
    # as a model that was stored in bf16 is read
    exact = tiny_model(dtype=torch.bfloat16).float()
    found = view_weights(bytes_of(publish_base(make_adapter(exact), dtype="bfloat16")))
    assert {tensor.dtype for tensor in found.values()} == {torch.bfloat16}


def test_an_adapter_of_another_base_is_refused() -> None:
    base, other = (bytes_of(publish_base(make_adapter(tiny_model(seed=n)), dtype="float32")) for n in (0, 1))
    adapter = bytes_of(publish_adapter(make_adapter(tiny_model()), digest_buffer(base)))
    merged_bytes(adapter, base)
    with pytest.raises(WeightsRejected, match="the adapter is for weights with digest"):
        merged_bytes(adapter, other)


def test_whole_weights_that_were_announced_as_an_adapter_are_refused() -> None:
    base = bytes_of(publish_base(make_adapter(tiny_model()), dtype="float32"))
    for file in (base, np.zeros(100, np.uint8)):
        with pytest.raises(WeightsDamaged):
            merged_bytes(file, base)


@pytest.mark.parametrize("change", ["no such layer", "another width", "another rank", "not two-dimensional"])
def test_an_adapter_that_does_not_fit_its_base_is_refused(change: str) -> None:
    adapter = make_adapter(tiny_model())
    base = bytes_of(publish_base(adapter, dtype="float32"))
    layer, (a, b) = next(iter(adapter.layers.items()))
    wrong = {
        "no such layer": {f"{layer}.x": (a, b)},
        "another width": {layer: (a[:, 1:], b)},
        "another rank": {layer: (a[1:], b)},
        "not two-dimensional": {layer: (a[0], b[0])},
    }[change]
    file = bytes_of(publish_adapter(replace(adapter, layers={**adapter.layers, **wrong}), digest_buffer(base)))
    with pytest.raises(WeightsRejected, match="does not fit its layer"):
        merged_bytes(file, base)
