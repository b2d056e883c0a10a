"""Claims about which columns are prompt and answer: by mapping, or by form."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.config.load import load_config
from pipeline.config.schema import RunConfig
from pipeline.data.report import SkipReason
from pipeline.data.source import PromptSource
from pipeline.data.tokenizer import TextTokenizer, load_text_tokenizer
from protocol.errors import DataError
from protocol.trajectory import Prompt

ASKED = [{"role": "user", "content": "1+2="}]
ANSWERED = [{"role": "assistant", "content": "3"}]
GSM8K = {"question": "How many clips?", "answer": "She sold 48/2 = <<48/2=24>>24 clips.\nIn all 72.\n#### 72"}
VERL = {
    "data_source": "openai/gsm8k",
    "prompt": ASKED,
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "3"},
    "extra_info": {"split": "train", "index": 0},
}


@pytest.fixture(scope="session")
def tokenizer(model_folder: Path) -> TextTokenizer:
    return load_text_tokenizer(model_folder)


def run_of(path: Path, **data: Any) -> RunConfig:
    given = {"train": [path], "shuffle": False, "verifier": "math", "chat": False, **data}
    return RunConfig.model_validate({"model": {"path": "unused"}, "data": given})


def jsonl(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def first(tmp_path: Path, tokenizer: TextTokenizer, row: dict[str, Any], **columns: str) -> Prompt:
    path = jsonl(tmp_path / "train.jsonl", row)
    return PromptSource(run_of(path, columns=columns), tokenizer).at(0)


@pytest.mark.parametrize(
    ("row", "is_chat"),
    [
        ({"prompt": "1+2=", "answer": 3}, False),
        ({"messages": ASKED, "answer": "3"}, True),
        ({"prompt": ASKED, "answer": "3"}, True),
        (VERL, True),
        ({**VERL, "reward_model": {"style": "rule", "ground_truth": ["3"]}}, True),
        ({"prompt": "1+2=", "completion": "3"}, False),
        ({"prompt": ASKED, "completion": ANSWERED}, True),
        ({"messages": [*ASKED, *ANSWERED]}, True),
        ({"prompt": ASKED, "solution": "3"}, True),
        ({"prompt": ASKED, "ground_truth": "3"}, True),
        ({"input": "1+2=", "label": "3"}, False),
        ({"context_messages": ASKED, "label": "3"}, True),
        ({"question": "1+2=", "answer": "One and two.\n#### 3"}, False),
        ({"problem": "1+2=", "solution": "long", "answer": "3"}, False),
    ],
)
def test_the_forms_of_gsm8k_verl_trl_and_openrlhf_need_no_mapping(
    tmp_path: Path, tokenizer: TextTokenizer, row: dict[str, Any], is_chat: bool
) -> None:
    prompt = first(tmp_path, tokenizer, row)
    assert prompt.answer == "3"
    assert prompt.text == (tokenizer.render_chat(ASKED)[0] if is_chat else "1+2=")


def test_columns_that_a_reward_function_may_take_by_name_are_kept(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    kept = first(tmp_path, tokenizer, VERL).extra
    assert kept == {name: VERL[name] for name in ("data_source", "ability", "reward_model", "extra_info")}
    assert first(tmp_path, tokenizer, {"prompt": "a", "solution": "3", "level": 2}).extra == {
        "solution": "3",
        "level": 2,
    }


def test_verls_parquet_is_read_as_it_is(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    path = tmp_path / "train.parquet"
    pq.write_table(pa.Table.from_pylist([VERL, VERL]), path)
    source = PromptSource(run_of(path), tokenizer)
    assert source.report.num_prompts == 2
    assert (source.at(0).answer, source.at(0).extra["data_source"]) == ("3", "openai/gsm8k")


@pytest.mark.parametrize(
    ("row", "columns"),
    [
        ({"task": {"q": "1+2="}, "out": {"final": 3}}, {"question": "task.q", "answer": "out.final"}),
        ({"a.b": "1+2=", "answer": "3"}, {"question": "a.b"}),
        ({"turns": ASKED, "notes": "so [3]\n=> 3"}, {"question": "turns.0.content", "answer": "notes", "answer_after": "=>"}),
        ({"prompt": "other", "messages": ASKED, "text": "1+2=", "answer": "3"}, {"question": "text"}),
        ({"prompt": "1+2=", "messages": ASKED, "answer": "3"}, {"question": "prompt"}),
        ({"prompt": "1+2=", "answer": "a solution", "result": "3"}, {"answer": "result"}),
    ],
)  # fmt: skip
def test_a_mapping_leads_to_columns_of_any_name_and_depth(
    tmp_path: Path, tokenizer: TextTokenizer, row: dict[str, Any], columns: dict[str, str]
) -> None:
    prompt = first(tmp_path, tokenizer, row, **columns)
    assert (prompt.text, prompt.answer) == ("1+2=", "3")


def test_a_mapped_conversation_goes_through_the_chat_template(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    prompt = first(tmp_path, tokenizer, {"turns": ASKED, "answer": "3"}, question="turns")
    assert prompt.text == tokenizer.render_chat(ASKED)[0]


def test_a_mapping_to_a_column_that_is_not_there_is_refused(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    with pytest.raises(DataError) as caught:
        first(tmp_path, tokenizer, VERL, answer="reward_model.truth")
    told = str(caught.value)
    assert "data.columns.answer is 'reward_model.truth', but no line has such a column" in told
    assert "reward_model.ground_truth" in told
    assert "train.jsonl" in told


def test_a_line_without_the_mapped_column_or_the_mark_is_skipped_by_itself(
    tmp_path: Path, tokenizer: TextTokenizer
) -> None:
    rows = [GSM8K, {"question": "b"}, {"question": "c", "answer": "no mark"}]
    path = jsonl(tmp_path / "train.jsonl", *rows)
    mapping = {"question": "question", "answer": "answer", "answer_after": "####"}
    source = PromptSource(run_of(path, columns=mapping), tokenizer)
    assert (source.num_prompts, source.at(0).answer) == (1, "72")
    assert source.report.skipped == {SkipReason.MISSING_FIELD: 1, SkipReason.EMPTY_ANSWER: 1}


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
@pytest.mark.parametrize(("row", "answer"), [(GSM8K, "72"), (VERL, "3")])
def test_raw_gsm8k_and_verls_form_train_with_six_lines_of_configuration(
    tmp_path: Path, model_folder: Path, ending: str, row: dict[str, Any], answer: str
) -> None:
    data = tmp_path / f"train.{ending}"
    if ending == "jsonl":
        jsonl(data, row)
    else:
        pq.write_table(pa.Table.from_pylist([row]), data)
    lines = ["[model]", f'path = "{model_folder}"', "[data]", f'train = ["{data}"]', 'verifier = "math"']
    assert len(lines) <= 6
    run = tmp_path / "run.toml"
    run.write_text("\n".join(lines))
    config = load_config([run])
    assert PromptSource(config, load_text_tokenizer(config.model.path)).at(0).answer == answer
