"""A model that no engine of ours can compute is refused before the start; a model of a known type
needs no trial."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from pipeline.preflight.checks import preflight
from pipeline.preflight.engines import KNOWN, check_engines
from protocol.errors import ConfigError, EngineError
from tests.pipeline.op_config import MODEL, op_config
from workers.engines.check import try_model

SMALL = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def small(kind: str, **more: Any) -> PretrainedConfig:
    settings: dict[str, Any] = {"num_hidden_layers": 2, **SMALL, **more}
    return CONFIG_MAPPING[kind](**settings)


@pytest.mark.parametrize("what", ["slots", "packed", "value"])
@pytest.mark.parametrize("kind", sorted(KNOWN))
def test_a_type_that_is_never_asked_for_passes_the_trial(kind: str, what: str) -> None:
    try_model(small(kind), what)


@pytest.mark.parametrize("what", ["slots", "packed"])
@pytest.mark.parametrize("kind", ["qwen2", "qwen3_moe", "mixtral", "gpt_neox"])
def test_other_types_that_our_engines_compute_pass_it_too(kind: str, what: str) -> None:
    try_model(small(kind), what)


@pytest.mark.parametrize("what", ["slots", "packed"])
@pytest.mark.parametrize("kind", ["gemma2", "gpt_oss", "bloom", "falcon", "mamba", "mpt", "rwkv", "lfm2"])
def test_an_architecture_that_an_engine_cannot_compute_is_refused(kind: str, what: str) -> None:
    sizes = {"hidden_size": 64, "vocab_size": 512, "num_attention_heads": 4}
    more = {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2} if kind == "lfm2" else {}
    config = CONFIG_MAPPING[kind]() if kind in ("mpt", "gpt_oss") else CONFIG_MAPPING[kind](**sizes, **more)
    with pytest.raises(EngineError):
        try_model(config, what)


def test_a_layer_that_does_not_come_to_our_attention_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer

    forward = Qwen2DecoderLayer.forward

    def skip(self, hidden_states, *args, **kwargs):
        return hidden_states if self.self_attn.layer_idx else forward(self, hidden_states, *args, **kwargs)

    monkeypatch.setattr(Qwen2DecoderLayer, "forward", skip)
    with pytest.raises(EngineError, match="has 2 layers, of which 1 call attention"):
        try_model(small("qwen2"), "packed")


def test_a_convolution_along_the_row_is_refused_although_attention_is_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.qwen2.modeling_qwen2 import Qwen2MLP

    init, forward = Qwen2MLP.__init__, Qwen2MLP.forward

    def with_convolution(self, config):
        init(self, config)
        self.short = torch.nn.Conv1d(config.hidden_size, config.hidden_size, 1)

    def convolve(self, x):
        return forward(self, self.short(x.transpose(1, 2)).transpose(1, 2))

    monkeypatch.setattr(Qwen2MLP, "__init__", with_convolution)
    monkeypatch.setattr(Qwen2MLP, "forward", convolve)
    with pytest.raises(EngineError, match="mixes tokens by Conv1d"):
        try_model(small("qwen2"), "packed")


def _model_of(folder: Path, kind: str) -> Path:
    """Return a copy of the small model whose config.json names another type."""
    path = folder / kind
    shutil.copytree(MODEL, path)
    settings = json.loads((path / "config.json").read_text())
    text = {key: settings[key] for key in ("vocab_size", "hidden_size", "num_hidden_layers", "max_position_embeddings")}
    (path / "config.json").write_text(json.dumps({"model_type": kind, "architectures": ["X"], **text}))
    return path


def test_a_configuration_with_such_a_model_is_refused_with_its_name_and_the_way_out(tmp_path: Path) -> None:
    config = op_config(tmp_path, f"model.path={_model_of(tmp_path, 'bloom')}")
    with pytest.raises(
        ConfigError, match=r"bloom: the local engine cannot serve it: BloomForCausalLM .* choose another model"
    ):
        preflight(config)


def test_cuda_that_is_asked_for_and_not_there_is_refused_by_its_setting(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    with pytest.raises(ConfigError, match=r"model\.device: device is 'cuda:0', but torch .* sees 0 CUDA devices"):
        preflight(op_config(tmp_path, "model.device=cuda:0"))


def test_models_of_known_types_on_auto_devices_cost_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.preflight.engines.ask", lambda *_, **__: pytest.fail("a process was started"))
    assert check_engines(op_config(tmp_path)) is None
