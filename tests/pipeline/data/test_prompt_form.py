from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.schema import RunConfig
from pipeline.data.end_tokens import end_tokens
from pipeline.data.guided_prompts import GuidedPrompts
from pipeline.data.prompt_form import CHAT_VARIABLES
from pipeline.data.source import PromptSource
from pipeline.data.tokenizer import TextTokenizer, load_text_tokenizer
from pipeline.preflight.prompts import check_prompts
from protocol.errors import ConfigError, DataError
from protocol.trajectory import Prompt
from tests.byte_tokenizer import NUM_TOKENS, write_byte_tokenizer

CHAT = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}<|turn|>\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% if thinks is defined and not thinks %}<no>{% endif %}{% endif %}"
)
TURN = NUM_TOKENS
"""Id of the token that ends a turn."""
BOS, EOS = 256, 257


def model(folder: Path, template: str | None = CHAT, **settings: Any) -> Path:
    """A folder with a tokenizer of bytes, <s>, </s> and <|turn|>, and these settings of generation."""
    folder.mkdir()
    write_byte_tokenizer(folder, template)
    from tokenizers import AddedToken, Tokenizer

    file = folder / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.add_special_tokens([AddedToken("<|turn|>", special=True, normalized=False)])
    tokenizer.save(str(file))
    (folder / "config.json").write_text(json.dumps({"vocab_size": TURN + 1}))
    (folder / "generation_config.json").write_text(json.dumps(settings))
    return folder


def run(folder: Path, rows: list[dict[str, Any]], settings: dict[str, Any] | None = None, **data: Any) -> RunConfig:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = {"responses" if "response" in rows[0] else "train": [path], "shuffle": False, "verifier": "math"}
    given = {"model": {"path": folder}, "data": {**files, **data}, **(settings or {})}
    return RunConfig.model_validate(given)


def prompts(config: RunConfig) -> list[Prompt]:
    source = PromptSource(config, load_text_tokenizer(config.model.path))
    return [source.at(index) for index in range(source.num_prompts)]


@pytest.fixture
def chat_model(tmp_path: Path) -> Path:
    return model(tmp_path / "chat")


ASKED = "<s>[user] 2+2?<|turn|>\n[assistant] "
QUESTION = {"question": "2+2?", "answer": "because\n#### 4"}


@pytest.mark.parametrize(
    ("data", "text"),
    [
        ({}, ASKED),
        ({"chat": False}, "2+2?"),
        ({"prompt_template": "Q: {prompt}"}, "Q: 2+2?"),
        ({"prompt_template": "Q: {prompt}", "chat": True}, ASKED.replace("2+2", "Q: 2+2")),
        ({"prompt_template": "<s>Q: {prompt}"}, "<s>Q: 2+2?"),
        ({"system_prompt": "Be brief."}, ASKED.replace("[user]", "[system] Be brief.<|turn|>\n[user]")),
        ({"chat_variables": {"thinks": False}}, ASKED + "<no>"),
    ],
)
def test_a_published_question_becomes_the_form_that_the_run_file_says(
    chat_model: Path, data: dict[str, Any], text: str
) -> None:
    (prompt,) = prompts(run(chat_model, [QUESTION], **data))
    assert (prompt.text, prompt.answer) == (text, "4")
    read = load_text_tokenizer(chat_model).decode(prompt.tokens.tolist(), skip_special_tokens=False)
    assert read == text if text.startswith("<s>") else "<s>" + text
    assert prompt.tokens.tolist().count(BOS) == 1


def test_a_prompt_that_is_rendered_already_is_read_as_it_is_with_one_first_token(chat_model: Path) -> None:
    rows = [{"prompt": ASKED, "answer": 4}, {"prompt": "<|turn|>" + ASKED[3:], "answer": 4}]
    whole, other = prompts(run(chat_model, rows))
    assert whole.tokens.tolist() == prompts(run(chat_model, [QUESTION]))[0].tokens.tolist()
    assert other.tokens.tolist()[:2] == [BOS, TURN]
    assert other.text == rows[1]["prompt"]


def test_without_a_chat_template_prompts_stay_text_and_settings_of_chat_are_refused(tmp_path: Path) -> None:
    plain = model(tmp_path / "plain", None)
    (prompt,) = prompts(run(plain, [QUESTION]))
    assert (prompt.text, prompt.tokens.tolist()[0], prompt.tokens.size) == ("2+2?", BOS, 5)
    for name, value in {"chat": True, "system_prompt": "x", "chat_variables": {"a": 1}}.items():
        with pytest.raises(ConfigError, match=f"data.{name} is set, but the model's tokenizer has no chat template"):
            prompts(run(plain, [QUESTION], **{name: value}))


def test_a_system_prompt_that_a_text_has_no_place_for_is_refused_and_one_that_is_there_stays(chat_model: Path) -> None:
    with pytest.raises(ConfigError, match=r"rows.jsonl:1: data.system_prompt is set, but the prompt '2\+2\?' is plain"):
        prompts(run(chat_model, [QUESTION], system_prompt="x", chat=False))
    said = [{"role": "system", "content": "y"}, {"role": "user", "content": "2+2?"}]
    (prompt,) = prompts(run(chat_model, [{"messages": said, "answer": 4}], system_prompt="x"))
    assert prompt.text.startswith("<s>[system] y<|turn|>\n[user]")


def test_a_set_has_a_form_of_its_own_in_training_and_evaluation(chat_model: Path) -> None:
    path = run(chat_model, [QUESTION]).data.train
    sets = [
        {"name": "text", "train": path, "chat": False},
        {"name": "chat", "train": path, "chat_variables": {"thinks": 0}},
    ]
    data = {"train": [], "sets": sets, "allow_overlap": True, "system_prompt": ""}
    evaluation = {"sets": [{"name": "own", "files": path, "system_prompt": "z"}]}
    config = RunConfig.model_validate({"model": {"path": chat_model}, "data": data, "evaluation": evaluation})
    source = PromptSource(config, load_text_tokenizer(chat_model))
    assert {source.at(index).text for index in range(2)} == {"2+2?", ASKED + "<no>"}
    assert source.evaluation_at(0).text == ASKED.replace("[user]", "[system] z<|turn|>\n[user]")


def test_variables_that_every_prompt_fills_are_refused(chat_model: Path) -> None:
    with pytest.raises(ValueError, match="chat_variables sets messages, which Headrace fills in for every prompt"):
        run(chat_model, [QUESTION], chat_variables={"messages": []})


def test_a_guided_prompt_of_a_question_goes_through_the_same_template(chat_model: Path) -> None:
    config = run(
        chat_model, [{**QUESTION, "judgment": "j"}], {"algorithm": {"name": "nlft"}}, chat_variables={"thinks": False}
    )
    (prompt,) = prompts(config)
    assert prompt.extra[CHAT_VARIABLES] == {"thinks": False}
    tokenizer = load_text_tokenizer(chat_model)
    guided = tokenizer.decode(GuidedPrompts(tokenizer, config.guidance).standard(prompt, "4").tolist())
    assert guided.startswith("[user] ")
    assert guided.endswith("2+2?\n[assistant] <no>")


def test_the_length_limit_counts_what_the_chat_template_adds(chat_model: Path) -> None:
    (prompt,) = prompts(run(chat_model, [QUESTION]))
    with pytest.raises(DataError, match=f"{prompt.tokens.size} tokens; data.max_prompt_tokens is 8"):
        prompts(run(chat_model, [QUESTION], max_prompt_tokens=8))


@pytest.mark.parametrize(
    ("template", "settings", "configured", "expected"),
    [
        (CHAT, {}, (), (EOS, TURN)),
        (None, {}, (7,), (7, EOS)),
        (None, {"eos_token_id": [TURN, EOS, EOS]}, (), (EOS, TURN)),
        ("{% for m in messages %}{{ m.content }} {{ eos_token }}{% endfor %}", {"eos_token_id": 3}, (), (3, EOS)),
        ("{{ raise_exception('no') }}", {"eos_token_id": None}, (), (EOS,)),
    ],
)
def test_tokenizer_model_and_template_name_the_end_tokens_together(
    tmp_path: Path,
    template: str | None,
    settings: dict[str, Any],
    configured: tuple[int, ...],
    expected: tuple[int, ...],
) -> None:
    folder = model(tmp_path / "model", template, **settings)
    assert end_tokens(folder, load_text_tokenizer(folder), configured) == expected


def test_an_end_token_beyond_the_vocabulary_is_refused_by_its_source(tmp_path: Path) -> None:
    folder = model(tmp_path / "model", eos_token_id=[EOS, 99999])
    tokenizer = load_text_tokenizer(folder)
    with pytest.raises(
        DataError, match=r"generation_config.json names the end token 99999; expected ids from 0 to 258"
    ):
        end_tokens(folder, tokenizer)
    (folder / "generation_config.json").unlink()
    with pytest.raises(ConfigError, match=r"generation\.stop_token_ids has 259; expected ids from 0 to 258"):
        end_tokens(folder, tokenizer, (259,))


def test_a_recorded_response_ends_with_the_models_own_turn_end_once(chat_model: Path) -> None:
    texts = ["4", "4<|turn|>", "4<|turn|>\n", "4</s>", "4"]
    rows: list[dict[str, Any]] = [{"question": "2+2?", "response": text, "verdict": 1} for text in texts]
    rows[-1]["finish_reason"] = "length"
    config = run(chat_model, rows, {"algorithm": {"name": "sft"}})
    source = PromptSource(config, load_text_tokenizer(chat_model))
    assert source.responses is not None
    four = load_text_tokenizer(chat_model).encode("4", add_special_tokens=False)
    read = [source.responses.at(source.at(index).prompt_id).tokens.tolist() for index in range(len(rows))]
    assert read == [[*four, end] for end in (TURN, TURN, TURN, EOS)] + [four]


def checked(config: RunConfig) -> dict[str, str]:
    tokenizer = load_text_tokenizer(config.model.path)
    return {one.check: one.words for one in check_prompts(config, PromptSource(config, tokenizer), tokenizer)}


def test_a_check_shows_the_form_and_the_first_prompt_as_the_model_reads_it(chat_model: Path) -> None:
    said = checked(run(chat_model, [QUESTION]))
    assert said["prompts"] == (
        f"training prompts: 1 are one user message in the chat template; the model reads rows:1 as {ASKED!r}"
    )
    assert said["end tokens"] == "a response ends with '</s>' (257), '<|turn|>' (258)"
    said = checked(run(chat_model, [QUESTION], chat=False))
    assert said["prompts"].endswith("as '<s>2+2?'; the tokenizer has a chat template, which data.chat = true uses")


def test_a_check_with_an_environment_shows_no_prompt_that_the_model_does_not_read(chat_model: Path) -> None:
    said = checked(run(chat_model, [QUESTION], {"environment": {"path": "mine:Game"}}))
    assert "mine:Game begins each conversation" in said["prompts"] and "2+2" not in said["prompts"]


def test_a_model_without_any_end_token_is_told(tmp_path: Path) -> None:
    folder = model(tmp_path / "model", None)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "eos_token": None}))
    assert "name no end token, so every response has 2048 tokens" in checked(run(folder, [QUESTION]))["end tokens"]


def test_first_tokens_are_written_once_whatever_the_text_begins_with(chat_model: Path) -> None:
    tokenizer: TextTokenizer = load_text_tokenizer(chat_model)
    plain = tokenizer.encode("a", add_special_tokens=False)
    texts = {"a": [BOS, *plain], "<s>a": [BOS, *plain], "<s>": [BOS], "<s><s>a": [BOS, BOS, *plain], "": [BOS]}
    assert {text: tokenizer.encode(text) for text in texts} == texts
