"""Claims about what the local engine makes of a model folder, also of one without weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file

from pipeline.data.end_tokens import end_tokens
from pipeline.data.tokenizer import load_text_tokenizer
from tests.pipeline.op_config import MODEL, op_config
from tests.workers.engines.generation_contract import drain, request
from workers.engines.generation.local.engine import build_local
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


def test_a_response_ends_at_every_end_token_of_the_models_own_settings(tmp_path: Path) -> None:
    folder = shutil.copytree(MODEL, tmp_path / "model")
    tokenizer = load_text_tokenizer(folder)
    (own,) = end_tokens(folder, tokenizer)
    (digit,) = tokenizer.encode("3")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [own, digit]}))
    engine = build_local(op_config(tmp_path), folder)
    engine.load_weights(load_file(MODEL / "model.safetensors"), 0)
    for number in range(8):
        engine.submit(request(number, prompt=tokenizer.encode("33+12="), window=40))
    written = [[int(token) for token in window.tokens] for window in drain(engine).values()]
    assert all(not {own, digit} & {*tokens[:-1]} for tokens in written)
    assert digit in {tokens[-1] for tokens in written}
