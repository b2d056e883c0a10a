"""A model that cannot be trained as a LoRA adapter is reported before the start."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from pipeline.preflight import lora as lora_check
from pipeline.preflight.lora import check_lora
from protocol.errors import ConfigError
from tests.pipeline.op_config import op_config


@pytest.mark.parametrize(
    ("overrides", "complaint"),
    [
        (["learner.backend=deepspeed", "learner.optimizer=muon"], "muon, which needs whole tensors, .* or adamw, or"),
        (["learner.lora.rank=-1"], "learner.lora.rank"),
        (["learner.lora.alpha=0"], "learner.lora.alpha"),
        (["learner.lora.dropout=0.1"], "learner.lora.dropout"),
    ],
)
def test_what_no_adapter_can_be_is_refused(tmp_path: Path, overrides: list[str], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        op_config(tmp_path, "learner.lora.rank=8", *overrides)


def test_peft_that_is_not_installed_is_refused_with_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lora_check, "installed", lambda _: None)
    config = op_config(tmp_path, "learner.lora.rank=8")
    with pytest.raises(ConfigError, match=r"not installed here; .* pip install 'headrace\[lora\]', or set .* to 0"):
        check_lora(config)


@pytest.mark.parametrize("version", ["0.20.3", "0.22.0", "1.21.0", "unknown"])
def test_another_version_of_peft_is_refused_by_name(tmp_path: Path, version: str) -> None:
    with pytest.raises(ConfigError, match=rf"peft {version} is installed; Headrace works with 0\.21 up to, not incl"):
        check_lora(op_config(tmp_path, "learner.lora.rank=8"), version)


def test_layers_that_the_model_has_not_are_refused_with_those_it_has(tmp_path: Path) -> None:
    config = op_config(tmp_path, "learner.lora.rank=8", "learner.lora.target_modules=['q_proj', 'query']")
    with pytest.raises(ConfigError, match=r"names 'query', but .* has no such layer; expected some of .*q_proj"):
        check_lora(config, "0.21.2")


@pytest.mark.parametrize("target", ["embed_tokens", "input_layernorm", "norm"])
def test_layers_that_are_not_linear_or_in_no_block_are_refused(tmp_path: Path, target: str) -> None:
    """peft would put an adapter on an embedding, or fail at the start."""
    config = op_config(tmp_path, "learner.lora.rank=8", f"learner.lora.target_modules=['q_proj', '{target}']")
    with pytest.raises(
        ConfigError, match=rf"names '{target}', which in .* is not only linear .* expected some of down_p"
    ):
        check_lora(config, "0.21.2")


def test_a_model_without_linear_layers_in_blocks_is_refused_even_if_no_target_is_named(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    save_file({"embed.weight": np.zeros((4, 2)), "blocks.0.filter": np.zeros((2, 2))}, model / "model.safetensors")
    config = op_config(tmp_path, "learner.lora.rank=8")
    section = config.model.model_copy(update={"path": model})
    with pytest.raises(ConfigError, match=r"has no linear layer in a numbered block, .* set learner.lora.rank to 0"):
        check_lora(config.model_copy(update={"model": section}), "0.21.2")


def test_what_will_be_trained_is_told(tmp_path: Path) -> None:
    config = op_config(
        tmp_path, "learner.lora.rank=8", "learner.lora.alpha=16", "learner.lora.target_modules=['q_proj']"
    )
    assert check_lora(config, "0.21.2") == ["learner: LoRA by peft 0.21.2, rank 8, alpha 16, on q_proj"]


def test_without_an_adapter_peft_is_not_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lora_check, "installed", lambda _: pytest.fail("peft was looked up"))
    assert check_lora(op_config(tmp_path)) == []
