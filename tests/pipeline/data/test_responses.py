from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.config.schema import RunConfig
from pipeline.data.places import pin_data
from pipeline.data.report import SkipReason
from pipeline.data.source import PromptSource
from pipeline.data.tokenizer import TextTokenizer, load_text_tokenizer
from pipeline.rewards.recorded import verify
from pipeline.rewards.verifier import Response, Verdict, VerifierFailure, VerifierFailureKind
from protocol.errors import ConfigError, DataError
from protocol.trajectory import FinishReason
from tests.pipeline.data.test_source import write

OFFLINE = {"name": "reinforce++", "group_size": 1, "importance": "none"}


@pytest.fixture(scope="module")
def tokenizer(model_folder: Path) -> TextTokenizer:
    return load_text_tokenizer(model_folder)


def config(*responses: Path, seed: int = 0, generation: dict[str, Any] | None = None, **data: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "run": {"seed": seed},
            "model": {"path": "unused"},
            "data": {"responses": responses, "chat": False, **data},
            "algorithm": OFFLINE,
            "generation": {"max_response_tokens": 64, "window_tokens": 16, **(generation or {})},
        }
    )


def source_of(
    path: Path, tokenizer: TextTokenizer, lines: Iterable[dict[str, Any] | bytes], **options: Any
) -> PromptSource:
    options.setdefault("shuffle", False)
    return PromptSource(config(write(path, lines), **options), tokenizer)


def recorded(source: PromptSource, position: int) -> tuple[list[int], FinishReason]:
    assert source.responses is not None
    found = source.responses.at(source.at(position).prompt_id)
    assert found.tokens.dtype == np.int32
    return found.tokens.tolist(), found.finish_reason


def test_a_line_becomes_a_prompt_with_verdict_and_judgment_and_its_tokens(
    tmp_path: Path, tokenizer: TextTokenizer
) -> None:
    lines = [
        {
            "question": "2+3=", "response": "2+3=6", "verdict": False, "answer": 5, "judgment": " step 1 says 6 ",
            "level": 1, "verifier": "math",
        },
        {"prompt": "1+1=", "response": "2", "verdict": "right"},
    ]  # fmt: skip
    source = source_of(tmp_path / "own.jsonl", tokenizer, lines)
    wrong, right = source.at(0), source.at(1)
    assert (wrong.prompt_id, wrong.text, wrong.answer, wrong.verifier) == ("own:1", "2+3=", "5", "recorded")
    assert wrong.extra == {"verdict": 0, "judgment": "step 1 says 6", "level": 1}
    assert (right.answer, right.extra) == ("", {"verdict": 1})
    tokens = tokenizer.encode("2+3=6", add_special_tokens=False)
    assert recorded(source, 0) == ([*tokens, tokenizer.eos_token_id], FinishReason.STOP)
    assert source.responses is not None
    assert source.responses.lines() == [
        f"2 responses: 1 right, 1 wrong, 1 with a judgment; the longest has {len(tokens) + 1} tokens"
    ]


@pytest.mark.parametrize(
    ("line", "columns", "expected"),
    [
        ({"prompt": "p", "completion": "r", "label": True, "answer": "1"}, {}, ("p", "r", 1, "1")),
        ({"question": "p", "output": "r", "accuracy": 0.0, "gold": "1"}, {}, ("p", "r", 0, "1")),
        ({"input": "p", "response": "r", "label": "1", "correct": 1}, {}, ("p", "r", 1, "1")),
        ({"prompt": "p", "completion": [{"role": "assistant", "content": "r"}], "is_correct": "no, "}, {}, None),
        (
            {"task": {"text": "p", "by": [{"says": "r"}]}, "mark": "Wrong", "fault": "j", "verdict": True},
            {"question": "task.text", "response": "task.by.0.says", "verdict": "mark", "judgment": "fault"},
            ("p", "r", 0, ""),
        ),
    ],
)
def test_columns_are_recognised_by_name_or_mapped(
    tmp_path: Path,
    tokenizer: TextTokenizer,
    line: dict[str, Any],
    columns: dict[str, str],
    expected: tuple[str, str, int, str] | None,
) -> None:
    path = tmp_path / "own.jsonl"
    if expected is None:
        with pytest.raises(DataError, match=r"is_correct is 'no, '; expected true or false"):
            source_of(path, tokenizer, [line], columns=columns)
        return
    source = source_of(path, tokenizer, [line], columns=columns)
    prompt, (tokens, _) = source.at(0), recorded(source, 0)
    assert (prompt.text, tokenizer.decode(tokens), prompt.extra["verdict"], prompt.answer) == expected
    assert prompt.extra.get("judgment") == ("j" if columns else None)
    assert "response" not in prompt.extra, "a chunk does not carry its response twice"


def test_a_conversation_that_ends_with_the_assistant_is_prompt_and_response(
    tmp_path: Path, tokenizer: TextTokenizer
) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    source = source_of(tmp_path / "chat.jsonl", tokenizer, [{"messages": messages, "verdict": 1}])
    assert source.at(0).text == tokenizer.apply_chat_template(messages[:1])
    assert tokenizer.decode(recorded(source, 0)[0]) == "yes"


def test_a_cut_response_gets_no_stop_token_and_none_gets_two(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    end = next(text for text, number in tokenizer.special_ids.items() if number == tokenizer.eos_token_id)
    lines = [
        {"prompt": "a", "response": "12", "verdict": 0, "finish_reason": "length"},
        {"prompt": "a", "response": "12" + end, "verdict": 1, "finish_reason": "stop"},
        {"prompt": "a", "response": "12;", "verdict": 1},
    ]
    source = source_of(tmp_path / "own.jsonl", tokenizer, lines, generation={"stop_strings": [";"]})
    twelve = tokenizer.encode("12", add_special_tokens=False)
    assert recorded(source, 0) == (twelve, FinishReason.LENGTH)
    assert recorded(source, 1) == ([*twelve, tokenizer.eos_token_id], FinishReason.STOP)
    assert recorded(source, 2) == (tokenizer.encode("12;", add_special_tokens=False), FinishReason.STOP)


def test_bad_lines_are_skipped_with_file_and_line(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    good = {"prompt": "a", "response": "1", "verdict": 1}
    broken: list[tuple[dict[str, Any] | bytes, SkipReason]] = [
        (b'{"prompt": "a"', SkipReason.NOT_JSON),
        ({"prompt": "a", "response": "1"}, SkipReason.MISSING_FIELD),
        ({"prompt": "a", "response": "1", "verdict": None}, SkipReason.MISSING_FIELD),
        ({"prompt": "a", "verdict": 1}, SkipReason.MISSING_FIELD),
        ({"response": "1", "verdict": 1}, SkipReason.MISSING_FIELD),
        ({**good, "verdict": 0.5}, SkipReason.WRONG_TYPE),
        ({**good, "verdict": "maybe"}, SkipReason.WRONG_TYPE),
        ({**good, "verdict": [1]}, SkipReason.WRONG_TYPE),
        ({**good, "response": 7}, SkipReason.WRONG_TYPE),
        ({**good, "judgment": 7}, SkipReason.WRONG_TYPE),
        ({**good, "response": " \n"}, SkipReason.EMPTY_RESPONSE),
        ({**good, "response": "1" * 64}, SkipReason.OVERLONG_RESPONSE),
        ({**good, "prompt": "x" * 50}, SkipReason.OVERLONG),
    ]
    path = tmp_path / "own.jsonl"
    source = source_of(path, tokenizer, [good, *(line for line, _ in broken)], max_prompt_tokens=40)
    assert source.num_prompts == 1
    assert source.report.skipped == Counter(reason for _, reason in broken)
    for reason, examples in source.report.examples.items():
        numbers = [number for number, (_, other) in enumerate(broken, start=2) if other is reason]
        assert [example.split(": ")[0] for example in examples] == [f"{path}:{n}" for n in numbers[:3]]
    assert "65 tokens; generation.max_response_tokens is 64" in source.report.examples[SkipReason.OVERLONG_RESPONSE][0]


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([{"prompt": "a", "response": "1"}] * 2, r"own\.jsonl:1: no verdict, and no line of the file has one"),
        ([{"prompt": "a", "verdict": 1}] * 2, r"own\.jsonl:1: no response, and no line of the file has one"),
        ([b"{", {"prompt": "a", "response": "1"}], r"own\.jsonl:2: no verdict"),
    ],
)
def test_a_file_without_verdicts_or_responses_is_refused_by_line(
    tmp_path: Path, tokenizer: TextTokenizer, lines: list[dict[str, Any] | bytes], words: str
) -> None:
    good = write(tmp_path / "good.jsonl", [{"prompt": "a", "response": "1", "verdict": 1}])
    with pytest.raises(DataError, match=words):
        PromptSource(config(good, write(tmp_path / "own.jsonl", lines)), tokenizer)


def test_another_verifier_judges_lines_without_verdicts(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    lines = [{"prompt": "1+1=", "response": "2", "answer": "2"}, {"prompt": "1+1=", "response": "2"}]
    source = source_of(tmp_path / "own.jsonl", tokenizer, lines, response_verifier="arithmetic")
    assert (source.num_prompts, source.at(0).verifier) == (1, "arithmetic")
    assert source.report.skipped == {SkipReason.MISSING_FIELD: 1}, "this verifier needs an answer"


def test_responses_to_one_question_have_ids_of_their_own(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    lines = [{"id": one, "prompt": "a", "response": str(n), "verdict": 1} for n, one in enumerate("qqrqr")]
    source = source_of(tmp_path / "own.jsonl", tokenizer, [*lines, {**lines[0], "id": "q#2", "response": "5"}])
    ids = [source.at(position).prompt_id for position in range(6)]
    assert ids == ["q", "q#2", "r", "q#3", "r#2", "q#2#2"]
    assert [tokenizer.decode(recorded(source, position)[0]) for position in range(6)] == list("012345")


@given(seed=st.integers(0, 2**31), size=st.integers(1, 20), epochs=st.integers(1, 3))
@settings(max_examples=20)
def test_the_order_is_seeded_and_each_epoch_has_every_response_once(
    tmp_path_factory: pytest.TempPathFactory, tokenizer: TextTokenizer, seed: int, size: int, epochs: int
) -> None:
    lines = [{"prompt": "a", "response": str(n), "verdict": n % 2} for n in range(size)]
    path = write(tmp_path_factory.mktemp("data") / "own.jsonl", lines)
    one, other = (PromptSource(config(path, seed=seed), tokenizer) for _ in range(2))
    assert one.digest == other.digest
    told = [tokenizer.decode(recorded(one, position)[0]) for position in range(epochs * size)]
    assert told == [tokenizer.decode(recorded(other, position)[0]) for position in range(epochs * size)]
    for epoch in range(epochs):
        assert sorted(map(int, told[epoch * size : (epoch + 1) * size])) == list(range(size))


def test_the_digest_covers_responses_verdicts_and_judgments(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    line = {"prompt": "a", "response": "1", "verdict": 1, "judgment": "x"}
    changes = [{}, {"response": "2"}, {"verdict": 0}, {"judgment": "y"}, {"finish_reason": "length"}]
    digests = [source_of(tmp_path / "own.jsonl", tokenizer, [line | change]).digest for change in changes]
    assert len(set(digests)) == len(changes)


def test_a_text_that_the_tokenizer_changes_is_told(tmp_path: Path) -> None:
    letters = load_text_tokenizer(Path(__file__).parents[3] / "ops" / "demo" / "tiny_model")
    lines = [{"prompt": "a", "response": text, "verdict": 1} for text in ("1", "\N{SNOWMAN}1")]
    source = source_of(tmp_path / "own.jsonl", letters, lines)
    assert source.responses is not None
    assert letters.decode(recorded(source, 1)[0]) == "1", "this tokenizer has no such character"
    changed = [line for line in source.responses.lines() if "change when tokenised and decoded" in line]
    assert len(changed) == 1
    assert changed[0].startswith("1 responses") and "own.jsonl:2" in changed[0]


def test_held_out_prompts_keep_a_verifier_of_their_own(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    held_out = write(tmp_path / "h.jsonl", [{"prompt": "2+2=", "answer": "4"}])
    own = write(tmp_path / "own.jsonl", [{"prompt": "a", "response": "1", "verdict": 1}])
    source = PromptSource(config(own, evaluation=(held_out,)), tokenizer)
    assert source.evaluation_at(0).verifier == "arithmetic"
    assert source.verifiers == {"arithmetic", "recorded"}
    with pytest.raises(ConfigError, match=r"verdicts of data\.responses, but responses to this prompt are sampled"):
        PromptSource(config(own, evaluation=(held_out,), verifier="recorded"), tokenizer)


def test_patterns_of_response_files_are_pinned(tmp_path: Path) -> None:
    line = {"prompt": "a", "response": "1", "verdict": 1}
    files = [write(tmp_path / name, [line]) for name in ("a.jsonl", "b.jsonl")]
    assert pin_data(config(tmp_path / "*.jsonl")).data.responses == tuple(files)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"algorithm": OFFLINE | {"group_size": 2}}, "set algorithm.group_size to 1"),
        ({"algorithm": OFFLINE | {"importance": "tis"}}, "set algorithm.importance to none"),
        ({"algorithm": OFFLINE | {"rejection": "k3", "rejection_upper": 1}}, "set algorithm.rejection to none"),
        ({"algorithm": OFFLINE | {"proximal": "interpolate"}}, "set algorithm.proximal to recompute"),
        ({"staleness": {"late": "drop"}}, "set staleness.late to wait"),
        ({"data": {"responses": ["a"], "train": ["b"]}}, "data.train and data.responses are both given"),
    ],
)
def test_settings_that_need_sampled_responses_are_refused(change: dict[str, Any], words: str) -> None:
    run = {"model": {"path": "unused"}, "data": {"responses": ["a"]}, "algorithm": OFFLINE}
    assert RunConfig.model_validate(run).has_sampling is False
    with pytest.raises(ValueError, match=words):
        RunConfig.model_validate(run | change)


@pytest.mark.parametrize(("written", "accuracy"), [(True, 1.0), (0, 0.0), (1.0, 1.0), (" Right", 1.0), ("wrong", 0.0)])
def test_the_recorded_verdict_is_the_accuracy(written: object, accuracy: float) -> None:
    response = Response(response_text="", answer="", verifier="recorded", extra={"verdict": written})
    (verdict,) = verify([response])
    assert isinstance(verdict, Verdict)
    assert verdict.accuracy == accuracy


@pytest.mark.parametrize("extra", [{}, {"verdict": "maybe"}, {"verdict": float("nan")}, {"verdict": None}])
def test_a_response_without_a_verdict_is_never_judged_as_wrong(extra: dict[str, Any]) -> None:
    (failure,) = verify([Response(response_text="", answer="", verifier="recorded", extra=extra)])
    assert isinstance(failure, VerifierFailure)
    assert failure.kind is VerifierFailureKind.BAD_ANSWER
