"""The number of tokens that a learning worker passes through its model at once when the
configuration does not set it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pipeline.config.learning import algorithm_settings
from pipeline.config.load import to_toml
from pipeline.config.schema import RunConfig
from tests.pipeline.runtime.fakes import small_config
from workers.engines.training.torch import forward_settings
from workers.engines.value.torch import value_settings

BY_DEVICE = pytest.mark.parametrize(("device", "tokens"), [("cpu", 1024), ("cuda", 16384), ("cuda:1", 16384)])


def with_critic(config: RunConfig) -> RunConfig:
    return config.model_copy(update={"algorithm": algorithm_settings(name="ppo")})


def configured(folder: Path, tokens: int) -> RunConfig:
    config = small_config(folder)
    sections = {
        name: getattr(config, name).model_copy(update={"micro_batch_tokens": tokens}) for name in ("learner", "value")
    }
    return config.model_copy(update=sections)


@BY_DEVICE
def test_micro_batches_that_are_not_set_suit_the_device(tmp_path: Path, device: str, tokens: int) -> None:
    config = with_critic(small_config(tmp_path))
    assert forward_settings(config, torch.device(device)).micro_batch_tokens == tokens
    assert value_settings(config, torch.device(device)).micro_batch_tokens == tokens
    assert "micro_batch_tokens" not in to_toml(config).partition("[value]")[2].partition("[")[0], "absent stays absent"


@BY_DEVICE
def test_micro_batches_that_are_set_are_so_on_every_device(tmp_path: Path, device: str, tokens: int) -> None:
    del tokens
    config = with_critic(configured(tmp_path, 4096))
    assert forward_settings(config, torch.device(device)).micro_batch_tokens == 4096
    assert value_settings(config, torch.device(device)).micro_batch_tokens == 4096
