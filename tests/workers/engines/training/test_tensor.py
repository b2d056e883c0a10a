"""What tensor parallelism refuses, before anything has changed, and what ranks send."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from protocol.errors import ConfigError
from tests.workers.engines.subjects import group
from tests.workers.engines.tiny import tiny_model
from workers.engines.training.ranks.tensor import split_layer, whole_parts


def test_a_layer_of_another_make_is_refused_by_its_part() -> None:
    config = AutoConfig.for_model(
        "phi3",
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=8,
        pad_token_id=0,
    )
    layer = AutoModelForCausalLM.from_config(config).model.layers[0]
    before = {name: type(value) for name, value in layer.named_parameters()}
    with pytest.raises(
        ConfigError, match=r"Phi3DecoderLayer has self_attn\.qkv_proj, a Linear that tensor parallelism"
    ):
        split_layer(layer, group().mesh)
    assert {name: type(value) for name, value in layer.named_parameters()} == before


@pytest.mark.integration
def test_two_ranks_send_for_a_gradient_what_the_programs_of_their_splits_say() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.workers.engines.training.counted", "2"],
        cwd=Path(__file__).resolve().parents[4],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=100.0,
    )
    assert done.returncode == 0, done.stdout[-8000:]


def test_the_norms_of_heads_are_the_parts_whose_gradient_each_rank_has_a_part_of() -> None:
    layer = tiny_model("qwen3").model.layers[0]
    names = {id(part): name for name, part in layer.named_modules()}
    assert {names[id(part)]: partial for part, partial in whole_parts(layer)} == {
        "self_attn.q_norm": True,
        "self_attn.k_norm": True,
        "input_layernorm": False,
        "post_attention_layernorm": False,
    }
