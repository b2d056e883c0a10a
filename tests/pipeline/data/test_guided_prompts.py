"""Claims about the prompts of guided passes: templates, what fills them, and their tokens."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.config.rewards import GuidanceSection
from pipeline.data.guided_prompts import GuidanceTemplate, GuidedPrompts, read_templates
from pipeline.data.prompt_form import MESSAGES
from pipeline.data.tokenizer import TextTokenizer, load_text_tokenizer
from protocol.errors import ConfigError, DataError
from protocol.trajectory import Prompt
from tests.byte_tokenizer import write_byte_tokenizer

CHAT = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture
def tokenizer(tmp_path: Path) -> TextTokenizer:
    return load_text_tokenizer(write_byte_tokenizer(tmp_path, CHAT))


def prompt_of(text: str, messages: list[dict[str, str]] | None = None) -> Prompt:
    extra = {} if messages is None else {MESSAGES: messages}
    return Prompt(
        prompt_id="t:1", tokens=np.array([1], np.int32), text=text, answer="13", verifier="arithmetic", extra=extra
    )


def section(folder: Path, standard: str, judge: str, **settings: int) -> GuidanceSection:
    (folder / "standard.txt").write_text(standard)
    (folder / "judge.txt").write_text(judge)
    return GuidanceSection(
        standard_template=folder / "standard.txt",
        judge_template=folder / "judge.txt",
        **settings,  # pyright: ignore[reportArgumentType]
    )


@pytest.mark.parametrize(
    ("standard", "judge", "message"),
    [
        ("{question}", "{question}{judgment}", r"standard_template: .*standard\.txt has no \{gold\}, but \{question\}"),
        (
            "the answer is {gold}",
            "{question}{judgment}",
            r"has no \{question\}, but \{gold\}; put \{question\} into it",
        ),
        ("{question}{gold}", "{question}{judgement}", r"judge_template: .*judge\.txt has no \{judgment\}"),
        ("{question}{gold}", "", r"has no \{question\} and no \{judgment\}, but no slot"),
        ("{question}{gold}{judgment}", "{question}{judgment}", "put {judgment} into guidance.judge_template"),
    ],
)
def test_a_template_without_its_slots_is_refused_by_file_and_slot(
    tmp_path: Path, standard: str, judge: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        read_templates(section(tmp_path, standard, judge))


def test_a_template_that_is_no_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"guidance\.judge_template: .*cannot be read as text"):
        read_templates(GuidanceSection(judge_template=tmp_path / "none.txt"))
    (tmp_path / "none.txt").write_bytes(b"{question}\xff{judgment}")
    with pytest.raises(ConfigError, match="cannot be read as text in UTF-8"):
        read_templates(GuidanceSection(judge_template=tmp_path / "none.txt"))


def test_built_in_templates_have_their_slots_and_end_with_the_question(tokenizer: TextTokenizer) -> None:
    prompts = GuidedPrompts(tokenizer, GuidanceSection())
    standard = tokenizer.decode(prompts.standard(prompt_of("7+5+1="), "13").tolist())
    judge = tokenizer.decode(prompts.judge(prompt_of("7+5+1="), "13", "step 2 says 14").tolist())
    assert "13" in standard and standard.endswith("7+5+1=")
    assert "step 2 says 14" in judge and "13" not in judge and judge.endswith("7+5+1=")


@given(
    st.lists(st.sampled_from(["{question}", "{gold}", "{judgment}", "{other}", "{", "a\n"]), max_size=6).map("".join)
)
def test_a_text_that_fills_a_slot_is_never_filled_itself(text: str) -> None:
    template = GuidanceTemplate("{{gold}} of {question}: {x} {judgment}\n", ("question", "judgment"), "t")
    filled = template.filled({"question": text, "gold": "13", "judgment": "wrong"})
    assert filled == f"{{13}} of {text}: {{x}} wrong"


def test_a_plain_prompt_has_the_tokens_of_the_filled_template(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    prompts = GuidedPrompts(tokenizer, section(tmp_path, "{gold}|{question}\n", "{judgment}|{question}\r\n"))
    assert prompts.standard(prompt_of("1+1="), "2").tolist() == tokenizer.encode("2|1+1=")
    tokens = prompts.judge(prompt_of("1+1="), "2", "not 3")
    assert tokens.tolist() == tokenizer.encode("not 3|1+1=") and tokens.dtype == np.int32


def test_of_a_conversation_only_the_last_message_of_the_user_changes(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    messages = [
        {"role": "system", "content": "be {gold}"},
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "yes?"},
        {"role": "user", "content": "1+1="},
    ]
    prompts = GuidedPrompts(tokenizer, section(tmp_path, "{gold}|{question}", "{judgment}|{question}"))
    tokens = prompts.standard(prompt_of("rendered", messages), "2")
    expected = "<system>be {gold}<user>hello<assistant>yes?<user>2|1+1=<assistant>"
    assert tokens.tolist() == tokenizer.encode(expected, add_special_tokens=False)
    with pytest.raises(DataError, match="no user message"):
        prompts.standard(prompt_of("rendered", messages[:1]), "2")


def test_a_text_over_the_limit_is_refused_with_both_numbers(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    given = section(tmp_path, "{gold}|{question}", "{judgment}|{question}", max_judgment_tokens=5)
    prompts = GuidedPrompts(tokenizer, given)
    prompts.standard(prompt_of("1+1="), "12345")
    with pytest.raises(DataError, match=r"the judgment has 6 tokens, but guidance\.max_judgment_tokens is 5"):
        prompts.judge(prompt_of("1+1="), "2", "123456")
    with pytest.raises(DataError, match="the gold text has 6 tokens"):
        prompts.standard(prompt_of("1+1="), "123456")


def test_no_guided_prompt_is_longer_than_the_longest_that_is_told(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    given = section(tmp_path, "{gold}|{question}", "{judgment}{gold}|{question}{question}", max_judgment_tokens=5)
    prompts = GuidedPrompts(tokenizer, given)
    assert prompts.longest(7, 0) == 1 + 14
    # the tokenizer puts a first token before a text, which the sampled prompt had too
    assert prompts.judge(prompt_of("1+1=23"), "12345", "12345").size == prompts.longest(7) - 1 == 1 + 14 + 10 - 1


def test_the_version_names_templates_tokenizer_and_model(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    same = section(tmp_path, "{gold}|{question}", "{judgment}|{question}")
    version = GuidedPrompts(tokenizer, same, model_digest="one").version
    assert version == GuidedPrompts(tokenizer, same, model_digest="one").version
    other = tmp_path / "other"
    other.mkdir()
    others = {
        GuidedPrompts(tokenizer, same, model_digest="two").version,
        GuidedPrompts(
            tokenizer, section(other, "{gold}.{question}", "{judgment}|{question}"), model_digest="one"
        ).version,
        GuidedPrompts(
            tokenizer, section(other, "{gold}|{question}", "{judgment}.{question}"), model_digest="one"
        ).version,
        GuidedPrompts(load_text_tokenizer(write_byte_tokenizer(other)), same, model_digest="one").version,
    }
    assert len(others) == 4 and version not in others


def test_characters_that_the_tokenizer_does_not_know_are_named() -> None:
    tiny = load_text_tokenizer(Path("ops/demo/tiny_model"))
    lost = GuidedPrompts(tiny, GuidanceSection()).lost_characters()
    assert {"G", ":", "T"} <= set(lost) and not {"a", "e", "t", "{"} & set(lost)
