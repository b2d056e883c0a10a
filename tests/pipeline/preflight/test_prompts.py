"""Stop strings that no response can hold are refused before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.config.data_sets import EvaluationSection
from pipeline.config.schema import RunConfig
from pipeline.data.tokenizer import load_text_tokenizer
from pipeline.preflight.prompts import check_stop_strings
from protocol.errors import ConfigError
from tests.byte_tokenizer import write_byte_tokenizer
from tests.pipeline.runtime.fakes import small_config

DEMO = Path(__file__).resolve().parents[3] / "ops" / "demo" / "tiny_model"


def config(tmp_path: Path, *stop_strings: str, **evaluation: object) -> RunConfig:
    whole = small_config(tmp_path)
    generation = whole.generation.model_copy(update={"stop_strings": stop_strings})
    return whole.model_copy(
        update={"generation": generation, "evaluation": EvaluationSection.model_validate(evaluation)}
    )


def test_what_the_tokenizer_can_write_is_taken(tmp_path: Path) -> None:
    tokenizer = load_text_tokenizer(write_byte_tokenizer(tmp_path))
    check_stop_strings(config(tmp_path, "</answer>", "\n\n", " Q:", "日本", " "), tokenizer)
    check_stop_strings(config(tmp_path, "=a", "12"), load_text_tokenizer(DEMO))


def test_a_special_token_is_named_with_the_setting_for_it(tmp_path: Path) -> None:
    tokenizer = load_text_tokenizer(write_byte_tokenizer(tmp_path))
    with pytest.raises(
        ConfigError, match=r"generation.stop_strings has 'x</s>', .* '</s>' is the special token 257.*\[257\]"
    ):
        check_stop_strings(config(tmp_path, "x</s>"), tokenizer)


def test_a_text_that_the_tokenizer_changes_is_refused_for_each_set(tmp_path: Path) -> None:
    sets = [{"name": "a", "files": ["x"], "stop_strings": ["1\n"]}]
    with pytest.raises(ConfigError, match=r"evaluation.sets a.stop_strings has '1\\n', which .* writes as '1'"):
        check_stop_strings(config(tmp_path, sets=sets), load_text_tokenizer(DEMO))
