"""Claims about the folders that can be a reward model, judged without loading them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from pipeline.preflight.checks import preflight
from pipeline.preflight.model_folder import check_reward_model, longest_input
from protocol.errors import ConfigError, DataError
from tests.pipeline.op_config import MODEL, op_config
from tests.workers.engines.tiny_reward import tiny_reward_model, write_reward_model


def change(folder: Path, **settings: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))


def test_a_classifier_with_one_label_is_taken(tmp_path: Path) -> None:
    assert check_reward_model(write_reward_model(tmp_path))["model_type"] == "qwen3"
    assert check_reward_model(write_reward_model(tmp_path / "bert", tiny_reward_model("bert")))["model_type"] == "bert"


def test_everything_else_is_refused_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no config\.json"):
        check_reward_model(tmp_path / "nowhere")
    with pytest.raises(DataError, match="Qwen3ForCausalLM, which does not score"):
        check_reward_model(MODEL)
    with pytest.raises(DataError, match="with 2 labels; expected 1"):
        check_reward_model(write_reward_model(tmp_path / "two", tiny_reward_model(num_labels=2)))
    with pytest.raises(DataError, match="with 3 labels; expected 1"):
        check_reward_model(write_reward_model(tmp_path / "three", tiny_reward_model(num_labels=3)))
    folder = write_reward_model(tmp_path / "headless")
    weights = {name: tensor for name, tensor in load_file(folder / "model.safetensors").items() if "score" not in name}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(DataError, match="have no head"):
        check_reward_model(folder)
    (folder / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(DataError, match="damaged"):
        check_reward_model(folder)
    change(write_reward_model(tmp_path / "pair"), is_encoder_decoder=True)
    with pytest.raises(DataError, match="an encoder with a decoder"):
        check_reward_model(tmp_path / "pair")


@pytest.mark.parametrize(
    ("config", "tokenizer", "max_tokens", "longest"),
    [
        ({"max_position_embeddings": 514}, 512, None, 512),
        ({"max_position_embeddings": 514}, 512, 514, 514),
        ({"n_positions": 1024}, 1e30, None, 1024),
        ({"text_config": {"max_position_embeddings": 100}}, None, None, 100),
        ({"max_position_embeddings": 4096}, None, 64, 64),
        ({}, None, None, None),
        ({}, 77, None, 77),
    ],
)
def test_the_longest_input_is_what_positions_tokenizer_and_setting_allow(
    tmp_path: Path, config: dict[str, Any], tokenizer: float | None, max_tokens: int | None, longest: int | None
) -> None:
    if tokenizer is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"model_max_length": tokenizer}))
    assert longest_input(tmp_path, config, max_tokens) == longest


def test_a_run_says_which_reward_model_it_has(tmp_path: Path) -> None:
    folder = write_reward_model(tmp_path / "judge")
    checked = preflight(op_config(tmp_path, f"reward.model.path={folder}"))
    assert f"reward model: {folder}" in checked.findings


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["reward.model.path=/nowhere"], "/nowhere is not a model"),
        ([f"reward.model.path={MODEL}"], "does not score texts"),
        (["reward.model.weight=1.0"], "`reward.model.path` is missing"),
        (["reward.model.path=JUDGE", "generation.max_response_tokens=230"], "is 262, but the reward model"),
        (
            ["reward.model.path=JUDGE", "reward.model.max_tokens=40"],
            "raise reward.model.max_tokens if that is the limit",
        ),
        (["reward.model.path=JUDGE", "reward.model.max_tokens=400"], "made for 256 positions"),
        (["data.verifier=reward_model"], "needs a reward model's score, but no reward model is configured"),
    ],
)
def test_a_reward_model_that_would_fail_late_fails_early(tmp_path: Path, overrides: list[str], message: str) -> None:
    folder = write_reward_model(tmp_path / "judge")
    with pytest.raises(ConfigError) as caught:
        preflight(op_config(tmp_path, *(override.replace("JUDGE", str(folder)) for override in overrides)))
    assert message in str(caught.value)


def test_a_chat_template_that_refuses_the_data_is_found_before_anything_starts(tmp_path: Path) -> None:
    folder = write_reward_model(tmp_path / "judge", template="{{ raise_exception('only Latin here') }}")
    with pytest.raises(DataError, match="the chat template refuses these messages: only Latin here"):
        preflight(op_config(tmp_path, f"reward.model.path={folder}"))
