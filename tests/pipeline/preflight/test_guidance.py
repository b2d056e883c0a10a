"""Claims about the room for guided prompts, before a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipeline.config.schema import RunConfig
from pipeline.data.prompt_form import MESSAGES
from pipeline.data.source import PromptSource
from pipeline.data.tokenizer import load_text_tokenizer
from pipeline.preflight.checks import preflight
from pipeline.preflight.guidance import load_guided_prompts, longest_read, longest_scored
from pipeline.preflight.model_folder import model_digest
from protocol.errors import ConfigError, DataError
from tests.byte_tokenizer import write_byte_tokenizer
from tests.pipeline.op_config import op_config
from workers.engines.generation.vllm.arguments import scoring_arguments

MIX = "algorithm.guidance=mix"


def config_of(tmp_path: Path, *overrides: str, standard: str = "s{gold}={question}") -> RunConfig:
    """A run of the demo's model, of 256 positions: prompts of 32 tokens, responses of 64."""
    (tmp_path / "standard.txt").write_text(standard)
    (tmp_path / "judge.txt").write_text("j{judgment}-{question}")
    return op_config(
        tmp_path,
        MIX,
        "data.max_prompt_tokens=32",
        "generation.window_tokens=64",
        "generation.max_response_tokens=64",
        f"guidance.standard_template={tmp_path / 'standard.txt'}",
        f"guidance.judge_template={tmp_path / 'judge.txt'}",
        *overrides,
    )


def told(config: RunConfig) -> list[str]:
    return [line for line in preflight(config).findings if line.startswith("guidance")]


def test_a_run_with_guidance_is_told_how_long_its_passes_become(tmp_path: Path) -> None:
    assert told(config_of(tmp_path, "guidance.max_judgment_tokens=50")) == [
        "guidance: passes of at most 148 tokens; one for a right response, two for a wrong one"
    ]
    assert told(op_config(tmp_path)) == []


def test_texts_that_may_not_fit_are_a_warning_and_no_room_at_all_is_refused(tmp_path: Path) -> None:
    warned = told(config_of(tmp_path, "guidance.max_judgment_tokens=300"))[1]
    assert "texts of 300 tokens" in warned and "make 398" in warned and "was made for 256 positions" in warned
    # 32 + 64 + 2 = 98 without a text: 158 more of the template leave no place
    fits = config_of(tmp_path, standard="s" * 158 + "{gold}={question}")
    assert "texts of" in told(fits)[1]
    with pytest.raises(
        ConfigError, match=r"with a text of one token and the longest response has 257 .*shorten guidance"
    ):
        preflight(config_of(tmp_path, standard="s" * 159 + "{gold}={question}"))


def test_a_template_without_a_slot_ends_the_checks(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no \{gold\}"):
        preflight(config_of(tmp_path, standard="{question}"))


def test_characters_without_a_token_are_a_warning(tmp_path: Path) -> None:
    warned = told(config_of(tmp_path, "guidance.max_judgment_tokens=50", standard="ABBA{gold}={question}"))[1]
    assert "no token for A B of the templates" in warned


def test_vllm_has_room_for_the_longest_guided_prompt_within_the_model_s_positions(tmp_path: Path) -> None:
    vllm = "reference.backend=vllm"
    config = config_of(tmp_path, vllm, "guidance.max_judgment_tokens=50")
    assert longest_scored(config) == 148
    assert longest_scored(config_of(tmp_path, vllm, "guidance.max_judgment_tokens=300")) == 255
    assert longest_scored(op_config(tmp_path, "data.max_prompt_tokens=32", "generation.max_response_tokens=64")) == 96
    on_torch = config_of(tmp_path)
    assert longest_read(on_torch, load_guided_prompts(on_torch)) == 256, "as many as the model has positions"


def test_vllm_is_started_with_that_room_and_a_position_for_the_token_it_samples(tmp_path: Path) -> None:
    config = config_of(tmp_path, "reference.backend=vllm", "guidance.max_judgment_tokens=50")
    assert scoring_arguments(config, config.reference_model, on_cpu=True)["max_model_len"] == 149


def test_a_conversation_is_kept_with_its_prompt_for_guidance_alone(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "1+1="}]
    model = tmp_path / "model"
    model.mkdir()
    tokenizer = load_text_tokenizer(write_byte_tokenizer(model, "{% for m in messages %}{{ m.content }}{% endfor %}"))
    for overrides, kept in ((["algorithm.guidance=mix"], {MESSAGES: messages}), ([], {})):
        config = op_config(tmp_path, *overrides)
        (tmp_path / "train.jsonl").write_text(json.dumps({"messages": messages, "answer": "2"}) + "\n")
        assert PromptSource(config, tokenizer).at(0).extra == kept


def test_the_guide_version_follows_the_weights_wherever_they_are(tmp_path: Path) -> None:
    model = Path("ops/demo/tiny_model")
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in ("config.json", "model.safetensors"):
        (copy / name).write_bytes((model / name).read_bytes())
    assert model_digest(copy) == model_digest(model)
    data = bytearray((copy / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (copy / "model.safetensors").write_bytes(data)
    assert model_digest(copy) != model_digest(model)
    assert model_digest(copy, with_weights=False) == model_digest(model, with_weights=False)
    with pytest.raises(DataError, match="is not a model that can be read"):
        model_digest(tmp_path / "none", with_weights=False)
    versions = {
        load_guided_prompts(config_of(tmp_path, f"model.reference_path={path}")).version for path in (model, copy)
    }
    assert len(versions) == 2
