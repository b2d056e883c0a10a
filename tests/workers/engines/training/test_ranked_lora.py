"""An adapter on shares is that of one process: its steps, checkpoints and publications. Run on two
ranks too, by the last test."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.rules import make_rule

pytest.importorskip("peft", reason="peft is not installed: make test-lora")


from pipeline.weights.digest import digest_buffer
from protocol.errors import DataError
from tests.pipeline.op_config import op_config
from tests.workers.engines.model.test_adapter import bytes_of
from tests.workers.engines.subjects import (
    FSDP2,
    RANKED,
    SMOOTH_EPS,
    TORCH,
    ZERO,
    Settings,
    Subject,
    compare_ranks,
    forget_followers,
)
from tests.workers.engines.tiny import make_samples, tiny_model
from tests.workers.engines.training.test_two_ranks import run
from tests.workers.engines.training.through_memory import ThroughMemory
from workers.engines.build import build_training_backend
from workers.engines.model.adapter import publish_merged
from workers.engines.model.weights_file import publish_tensors
from workers.engines.training.ranks.backend import RankedTraining
from workers.engines.training.ranks.launch import is_rank
from workers.engines.training.seam import TrainingBackend

# transformers imports DeepSpeed to save a model, where accelerate and DeepSpeed are both installed
pytestmark = pytest.mark.filterwarnings("default")

SETTINGS = Settings(learning_rate=1e-3, warmup_steps=2, weight_decay=0.1, eps=SMOOTH_EPS, lora_rank=4)
SAME = 1e-5
"""Largest difference of a merged weight to one process's after four steps, from another order of
adding in float32."""


@pytest.fixture(params=RANKED if is_rank() else [FSDP2, ZERO[1]], ids=lambda subject: subject.name)
def ranked(request: pytest.FixtureRequest) -> Iterator[Subject]:
    yield request.param
    forget_followers()


def steps(backend: TrainingBackend, seeds: range) -> list[tuple[float, float]]:
    made = [backend.step(make_samples(seed=seed), make_rule()) for seed in seeds]
    assert all(step.applied for step in made)
    return [(step.loss, step.grad_norm) for step in made]


def weights(backend: TrainingBackend) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in backend.tensors()}


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def agree(left: TrainingBackend, right: TrainingBackend) -> None:
    expected = weights(right)
    for name, tensor in weights(left).items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=SAME, msg=name)


@pytest.mark.parametrize("tied", [True, False])
def test_an_adapter_on_ranks_makes_the_steps_of_one_process(ranked: Subject, tied: bool) -> None:
    plain = TORCH.make(tiny_model("qwen2", tie_word_embeddings=tied), SETTINGS)
    shared = ranked.make(tiny_model("qwen2", tie_word_embeddings=tied), SETTINGS)
    before = weights(shared)
    for expected, got in zip(steps(plain, range(4)), steps(shared, range(4)), strict=True):
        assert got == pytest.approx(expected, rel=1e-3, abs=1e-6)
    agree(shared, plain)
    moved = {name for name, tensor in weights(shared).items() if not torch.equal(tensor, before[name])}
    assert moved == {name for name in before if name.endswith("_proj.weight")}
    samples = make_samples(seed=9)
    for left, right in zip(shared.response_logprobs(samples), plain.response_logprobs(samples), strict=True):
        np.testing.assert_allclose(left, right, atol=1e-4, rtol=0)


def test_an_adapter_in_low_precision_makes_the_steps_of_one_process_and_keeps_no_fp32_copy(ranked: Subject) -> None:
    half = replace(SETTINGS, autocast=torch.bfloat16)
    plain, shared = (subject.make(tiny_model(tie_word_embeddings=False), half) for subject in (TORCH, ranked))
    assert isinstance(shared, RankedTraining)
    for expected, got in zip(steps(plain, range(3)), steps(shared, range(3)), strict=True):
        assert got == pytest.approx(expected, rel=2e-2, abs=1e-3)
    kept: dict[str, torch.Tensor] = cast("Any", shared._model.shards)._parameters
    low = [name for name, one in kept.items() if one.dtype == torch.bfloat16 and not one.requires_grad]
    # DeepSpeed gives all of a module's parameters one type
    assert bool(low) is (ranked is FSDP2) and {one.dtype for one in kept.values() if one.requires_grad} == {
        torch.float32
    }
    published = weights(shared)
    assert {tensor.dtype for tensor in published.values()} == {torch.float32}
    samples = make_samples(seed=9)
    for left, right in zip(shared.response_logprobs(samples), plain.response_logprobs(samples), strict=True):
        # two steps of bfloat16 between 4 and 8
        np.testing.assert_allclose(left, right, atol=2 / 32, rtol=0)


def test_every_rank_has_the_same_adapter_after_steps_and_a_load(ranked: Subject, tmp_path: Path) -> None:
    shared = ranked.make(tiny_model(), SETTINGS)
    assert isinstance(shared, RankedTraining)
    steps(shared, range(2))
    compare_ranks(shared)
    shared.snapshot()(tmp_path)
    again = ranked.make(tiny_model(), SETTINGS)
    assert isinstance(again, RankedTraining)
    again.load(tmp_path)
    compare_ranks(again)


def test_a_checkpoint_of_an_adapter_goes_on_under_any_backend(ranked: Subject, tmp_path: Path) -> None:
    through = TORCH.make(tiny_model(), SETTINGS)
    steps(through, range(2))
    through.snapshot()(tmp_path / "torch")
    shared = ranked.make(tiny_model(), SETTINGS)
    steps(shared, range(40, 41))
    shared.load(tmp_path / "torch")
    assert same(weights(shared), weights(through))
    steps(shared, range(2, 4))
    shared.snapshot()(tmp_path / "shared")
    state = load_file(tmp_path / "shared" / "optimizer.safetensors")
    adapter = load_file(tmp_path / "shared" / "adapter" / "adapter_model.safetensors")
    assert state.keys() == load_file(tmp_path / "torch" / "optimizer.safetensors").keys()
    assert all(".lora_" in name for name in state if not name.startswith("rng/"))
    assert len(adapter) == 2 * 2 * 7
    back = TORCH.make(tiny_model(), SETTINGS)
    back.load(tmp_path / "shared")
    assert same(weights(back), weights(shared))
    steps(through, range(2, 6))
    steps(back, range(4, 6))
    agree(back, through)


def test_a_resumed_adapter_on_ranks_goes_on_bit_for_bit(ranked: Subject, tmp_path: Path) -> None:
    through = ranked.make(tiny_model(), SETTINGS)
    steps(through, range(2))
    through.snapshot()(tmp_path)
    resumed = ranked.make(tiny_model(), SETTINGS)
    resumed.load(tmp_path)
    assert steps(through, range(2, 4)) == steps(resumed, range(2, 4))
    assert same(weights(through), weights(resumed))


def test_an_adapter_on_ranks_goes_on_bit_for_bit_from_a_snapshot_in_memory(ranked: Subject, tmp_path: Path) -> None:
    through, memory = ranked.make(tiny_model(), SETTINGS), ThroughMemory(tmp_path)
    steps(through, range(2))
    assert not [spec.name for spec in through.live_state().specs if "base_layer" in spec.name]
    filled = memory.fill(through)
    resumed = ranked.make(tiny_model(), SETTINGS)
    resumed.put_back(memory.read(filled))
    assert steps(through, range(2, 4)) == steps(resumed, range(2, 4))
    assert same(weights(through), weights(resumed))


def test_the_adapter_of_ranks_merged_on_arrival_is_their_merged_file_bit_for_bit(ranked: Subject) -> None:
    shared = ranked.make(tiny_model(), SETTINGS)
    publication = shared.base_publication()
    assert publication is not None
    base = bytes_of(publication)
    assert np.array_equal(
        base, bytes_of(publish_tensors(TORCH.make(tiny_model(), Settings()).tensors(), dtype="float32"))
    )
    steps(shared, range(2))
    arrived = bytes_of(shared.publication(digest_buffer(base)))
    assert arrived.size < base.size / 2
    merged = bytes_of(publish_merged(arrived, base, digest_buffer(base), dtype="float32"))
    assert np.array_equal(merged, bytes_of(publish_tensors(shared.tensors(), dtype="float32")))


def test_gradient_checkpointing_under_an_adapter_changes_nothing(ranked: Subject) -> None:
    made = []
    for setting in (False, True):
        backend = ranked.make(tiny_model(), Settings(lora_rank=4, gradient_checkpointing=setting, eps=SMOOTH_EPS))
        steps(backend, range(2))
        made.append(backend)
    agree(*made)


def test_a_damaged_checkpoint_of_an_adapter_changes_no_rank(ranked: Subject, tmp_path: Path) -> None:
    shared = ranked.make(tiny_model(), SETTINGS)
    steps(shared, range(1))
    shared.snapshot()(tmp_path)
    path = tmp_path / "adapter" / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-20])
    before = weights(shared)
    with pytest.raises(DataError, match=r"adapter_model\.safetensors cannot be read"):
        shared.load(tmp_path)
    assert same(before, weights(shared))


@pytest.mark.skipif(is_rank(), reason="on two ranks already")
@pytest.mark.parametrize("backend", ["fsdp2", "deepspeed"])
def test_a_runs_adapter_settings_reach_the_ranks(tmp_path: Path, backend: str) -> None:
    tiny_model().save_pretrained(tmp_path / "tiny")
    config = op_config(
        tmp_path, f"model.path={tmp_path / 'tiny'}", f"learner.backend={backend}", "learner.lora.rank=3",
        "learner.lora.alpha=6", "learner.lora.target_modules=['q_proj']",
    )  # fmt: skip
    made = build_training_backend(config)
    assert isinstance(made, RankedTraining)
    adapter = made.adapter()
    assert adapter is not None and adapter.scaling == 2.0
    assert {name.rpartition(".")[2] for name in adapter.layers} == {"q_proj"}
    assert {a.shape[0] for a, _ in adapter.layers.values()} == {3}


@pytest.mark.integration
@pytest.mark.timeout(900)
@pytest.mark.skipif(is_rank(), reason="on two ranks already")
@pytest.mark.parametrize("chosen", ["makes_the_steps", pytest.param("not makes_the_steps", marks=pytest.mark.long)])
def test_all_of_this_holds_on_two_ranks(chosen: str) -> None:
    code, said = run("2", "-q", str(Path(__file__)), "-k", chosen)
    assert code == 0, said[-8000:]
    assert " passed" in said
