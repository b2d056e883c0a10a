"""A model that no engine of ours can compute is refused before the start. A model that takes a
slower way is named. A model of a known type needs no trial."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.olmo2.modeling_olmo2 import Olmo2DecoderLayer, Olmo2MLP

from pipeline.config.schema import RunConfig
from pipeline.preflight.ask import CheckReport
from pipeline.preflight.checks import preflight
from pipeline.preflight.engines import KNOWN, check_engines
from pipeline.preflight.model_folder import longest_context
from protocol.errors import ConfigError, EngineError
from tests.pipeline.op_config import MODEL, op_config
from tests.workers.engines.families import PACKED, family_model
from workers.engines.check import check, try_model, without_weights
from workers.engines.model.packed import packing_of, prepare_packed

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


def test_a_type_that_is_never_asked_for_is_among_those_computed_without_padding() -> None:
    assert PACKED.keys() >= KNOWN


@pytest.mark.parametrize("what", ["slots", "packed", "shared", "value"])
@pytest.mark.parametrize("kind", ["qwen2", "qwen3_moe", "mixtral", "gpt_neox", "gemma2", "gpt_oss"])
def test_a_large_model_makes_its_trial_without_weights(kind: str, what: str) -> None:
    more = {"num_local_experts": 4} if kind == "gpt_oss" else {}
    assert try_model(without_weights(small(kind, **more), what), what) is None


@pytest.mark.parametrize("what", ["packed", "value"])
@pytest.mark.parametrize("kind", ["bloom", "mamba", "mpt", "lfm2"])
def test_a_model_whose_sequences_are_padded_is_named(kind: str, what: str) -> None:
    note = try_model(family_model(kind, torch.float32), "packed")
    assert note is not None and "sequences are padded, not packed" in note


def test_a_model_that_is_sampled_a_row_at_a_time_is_named() -> None:
    note = try_model(family_model("bloom", torch.float32), "slots")
    assert note is not None and "computes a row at a time, which is slow" in note


def test_a_model_that_sees_later_tokens_is_refused() -> None:
    encoder = AutoModelForCausalLM.from_config(small("bert", pad_token_id=0)).eval()
    with pytest.raises(EngineError, match="BertLMHeadModel is not causal: a token's outputs depend on later tokens"):
        try_model(encoder, "packed")


def test_a_model_that_keeps_its_state_to_itself_cannot_be_sampled_from() -> None:
    hidden = AutoModelForCausalLM.from_config(small("recurrent_gemma", num_hidden_layers=3)).eval()
    with pytest.raises(EngineError, match=r"cannot be sampled token by token: .* generation\.engine = 'vllm'"):
        try_model(hidden, "slots")


@pytest.mark.parametrize("what", ["shared", "shared value"])
def test_a_model_whose_sequences_are_padded_is_not_cut_into_shares(what: str) -> None:
    model = family_model("bloom", torch.float32)
    if what == "shared value":
        model = without_weights(model.config, what)
    with pytest.raises(EngineError, match=r"needs padded batches .*; set the backend to torch"):
        try_model(model, what)


def reason_of(model: PreTrainedModel) -> str:
    return packing_of(prepare_packed(model)).unpacked_because


def test_a_layer_that_does_not_come_to_our_attention_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = Olmo2DecoderLayer.forward

    def skip(self, hidden_states, *args, **kwargs):
        return hidden_states if self.self_attn.layer_idx else forward(self, hidden_states, *args, **kwargs)

    assert reason_of(family_model("olmo2")) == ""
    monkeypatch.setattr(Olmo2DecoderLayer, "forward", skip)
    assert "of its 2 layers, 1 call attention" in reason_of(family_model("olmo2"))


def test_a_convolution_along_the_row_is_seen_although_attention_is_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    init, forward = Olmo2MLP.__init__, Olmo2MLP.forward

    def with_convolution(self, config):
        init(self, config)
        self.short = torch.nn.Conv1d(config.hidden_size, config.hidden_size, 1)

    def convolve(self, x):
        return forward(self, self.short(x.transpose(1, 2)).transpose(1, 2))

    monkeypatch.setattr(Olmo2MLP, "__init__", with_convolution)
    monkeypatch.setattr(Olmo2MLP, "forward", convolve)
    assert "it mixes tokens by Conv1d too" in reason_of(family_model("olmo2"))


def test_tokens_that_mix_by_arithmetic_alone_are_seen_by_their_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = Olmo2MLP.forward
    monkeypatch.setattr(Olmo2MLP, "forward", lambda self, x: forward(self, x + 0.1 * x.cumsum(1)))
    assert "its numbers differ from transformers' own" in reason_of(family_model("olmo2"))


def test_a_window_that_does_not_come_to_our_attention_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trial's sequences are shorter than most windows."""
    model = family_model("olmo3")
    assert reason_of(family_model("olmo3")) == ""
    for layer in model.model.layers:
        layer.self_attn.sliding_window = None
    assert "of its 2 layers with a window, 0 hand it to attention" in reason_of(model)


def test_a_configuration_with_such_a_model_is_refused_with_its_name_and_the_way_out(tmp_path: Path) -> None:
    path = tmp_path / "bert"
    shutil.copytree(MODEL, path)
    for file in path.glob("*.safetensors*"):
        file.unlink()
    AutoModelForCausalLM.from_config(small("bert", pad_token_id=0)).save_pretrained(path)
    with pytest.raises(
        ConfigError,
        match=r"bert: the local engine cannot serve it: .* Choose another model \(Qwen2, Qwen3 and Llama work\)",
    ):
        check(op_config(tmp_path, f"model.path={path}"))


@pytest.mark.parametrize(
    ("model", "limit"),
    [
        ({"max_position_embeddings": 512}, 512),
        ({"n_positions": 256}, 256),
        ({"max_seq_len": 128}, 128),
        ({"text_config": {"max_position_embeddings": 64}}, 64),
        ({"model_type": "bloom"}, None),
        ({"max_position_embeddings": 512, "rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, 512),
        ({"max_position_embeddings": 512, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, 512),
        (
            {
                "max_position_embeddings": 512,
                "rope_parameters": {"rope_type": "longrope", "original_max_position_embeddings": 32},
            },
            32,
        ),
    ],
)
def test_a_response_fits_positions_that_are_the_same_in_every_row(model: dict[str, Any], limit: int | None) -> None:
    assert longest_context(model)[0] == limit


def test_cuda_that_is_asked_for_and_not_there_is_refused_by_its_setting(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    with pytest.raises(ConfigError, match=r"model\.device: device is 'cuda:0', but torch .* sees 0 CUDA devices"):
        preflight(op_config(tmp_path, "model.device=cuda:0"))


def test_models_of_known_types_on_auto_devices_cost_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.preflight.engines.ask", lambda *_, **__: pytest.fail("a process was started"))
    assert check_engines(op_config(tmp_path)) == []


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was asked in a process of its own; the answer is that all is well."""
    modules: list[str] = []

    def ask(module: str, *_: object, **__: object) -> CheckReport:
        modules.append(module)
        return CheckReport(None, "gpt2 computes a row at a time")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("pipeline.preflight.engines.ask", ask)
    return modules


def uncertain(folder: Path, *settings: str) -> RunConfig:
    """A run whose model only a trial shows to be computable."""
    path = folder / "gpt2"
    if not path.exists():
        shutil.copytree(MODEL, path)
        shape: dict[str, Any] = {"n_layer": 1, "n_embd": 8, "n_head": 1}
        AutoModelForCausalLM.from_config(CONFIG_MAPPING["gpt2"](**shape)).save_pretrained(path)
    return op_config(folder, f"model.path={path}", *settings)


def test_a_trial_that_passed_is_not_made_again_and_its_notes_stay(tmp_path: Path, asked: list[str]) -> None:
    first = check_engines(uncertain(tmp_path))
    assert first[1] == "engines: gpt2 computes a row at a time"
    assert check_engines(uncertain(tmp_path, "run.name=another", "run.seed=7")) == first
    assert len(asked) == 1
    check_engines(uncertain(tmp_path), asks_again=True)
    assert len(asked) == 2, "doctor asks anyway"


def test_what_others_may_have_written_passes_no_check(tmp_path: Path, asked: list[str]) -> None:
    check_engines(uncertain(tmp_path))
    folder = tmp_path / "cache" / "headrace" / "checks"
    folder.chmod(0o770)
    with capture_logs() as log:
        check_engines(uncertain(tmp_path))
    assert len(asked) == 2
    (line,) = log
    assert line["event"] == "check_not_remembered" and f"chmod 700 {folder}" in line["reason"]


@pytest.mark.parametrize("changed", ["setting", "model", "version", "environment"])
def test_a_trial_is_made_again_when_its_answer_may_be_another(
    tmp_path: Path, asked: list[str], changed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_engines(uncertain(tmp_path))
    match changed:
        case "model":
            file = tmp_path / "gpt2" / "config.json"
            file.write_text(file.read_text() + "\n")
        case "version":
            monkeypatch.setattr("pipeline.preflight.passed.installed", lambda _: "99.0")
        case "environment":
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    check_engines(uncertain(tmp_path, *(["generation.num_slots=3"] if changed == "setting" else [])))
    assert len(asked) == 2


def test_a_refusal_and_a_trial_of_ones_own_code_are_never_remembered(
    tmp_path: Path, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = "algorithm.name=tests.pipeline.preflight.own_rule:OwnDapo"
    for _ in range(2):
        check_engines(uncertain(tmp_path, own))
    assert len(asked) == 2
    monkeypatch.setattr("pipeline.preflight.engines.ask", lambda *_, **__: CheckReport("no such layer", ""))
    for _ in range(2):
        with pytest.raises(ConfigError, match="no such layer"):
            check_engines(uncertain(tmp_path))
