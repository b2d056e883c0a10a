"""Claims about the engine of a joined host, whose model folder has no weights."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file

from tests.pipeline.op_config import MODEL, op_config
from workers.engines.generation.local.build import build_local
from workers.engines.model.loading import load_model, load_structure

CPU = torch.device("cpu")


def without_weights(folder: Path) -> Path:
    shutil.copytree(MODEL, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    return folder


def test_a_model_made_without_weights_is_the_loaded_one_once_it_has_them(tmp_path: Path) -> None:
    whole = load_model(MODEL, torch.float32, CPU)
    made = load_structure(without_weights(tmp_path / "model"), torch.float32, CPU)
    assert made.state_dict().keys() == whole.state_dict().keys()
    made.load_state_dict(whole.state_dict())
    assert dict(made.named_buffers()).keys() == dict(whole.named_buffers()).keys()
    for name, buffer in made.named_buffers():
        assert torch.equal(buffer, whole.get_buffer(name))
    tokens = torch.arange(1, 12)[None]
    assert torch.equal(made(tokens).logits, whole(tokens).logits)
    assert made.generation_config.eos_token_id == whole.generation_config.eos_token_id
    assert not made.training and not whole.training


def test_the_local_engine_starts_without_weights_and_serves_the_first_version(tmp_path: Path) -> None:
    engine = build_local(op_config(tmp_path), without_weights(tmp_path / "model"))
    assert engine.policy_version == -1
    tensors = load_file(MODEL / "model.safetensors")
    engine.load_weights(tensors, 0)
    assert engine.policy_version == 0
    assert engine.unserved(tensors) == []
