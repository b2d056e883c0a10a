"""Claims about the settings that a sink shows."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.config import RESOLVED_NAME
from pipeline.config.load import write_resolved
from pipeline.observability.sinks.seam import SinkFailed, spec_of
from tests.pipeline.op_config import op_config

SECRET = "of-a-test"


def test_settings_are_shown_flat_and_without_a_secret(tmp_path: Path) -> None:
    config = op_config(
        tmp_path,
        f"ledger.url=rediss://user:{SECRET}@ledger.example/0",
        f'generation.vllm.engine_args={{hf_token="{SECRET}", seed=3}}',
        "run.seed=7",
    )
    write_resolved(config, tmp_path)
    spec = spec_of(tmp_path, "x")
    assert SECRET not in str(spec.parameters) + spec.settings_text
    assert spec.parameters["ledger.url"] == "rediss://***@ledger.example/0"
    assert spec.parameters["generation.vllm.engine_args.hf_token"] == "***"
    assert spec.parameters["generation.vllm.engine_args.seed"] == 3
    assert spec.parameters["run.seed"] == 7
    assert spec.parameters["generation.window_tokens"] == config.generation.window_tokens, "tokens are no secret"
    assert all(isinstance(value, str | int | float | bool) for value in spec.parameters.values())
    assert spec.setting("tensorboard") is True and spec.setting("wandb") is None


def test_settings_that_cannot_be_read_are_a_trouble_of_the_sink(tmp_path: Path) -> None:
    with pytest.raises(SinkFailed, match="settings cannot be read"):
        spec_of(tmp_path, "")
    (tmp_path / RESOLVED_NAME).write_text("not = toml = at all")
    with pytest.raises(SinkFailed, match="settings cannot be read"):
        spec_of(tmp_path, "")
