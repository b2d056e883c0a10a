from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.config.data_sets import EvaluationSection
from pipeline.config.rewards import EnvironmentSection
from pipeline.config.schema import RunConfig
from pipeline.config.training import RewardSection
from pipeline.data.places import pin_data
from pipeline.data.report import SkipReason
from pipeline.data.source import HeldOutSource, PromptSource
from pipeline.data.tokenizer import TextTokenizer, load_text_tokenizer
from pipeline.environments.turns import row_of
from protocol.errors import ConfigError, DataError


@pytest.fixture(scope="session")
def tokenizer(model_folder: Path) -> TextTokenizer:
    return load_text_tokenizer(model_folder)


def write(path: Path, lines: Iterable[dict[str, Any] | bytes]) -> Path:
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_bytes(b"".join((x if isinstance(x, bytes) else json.dumps(x).encode()) + b"\n" for x in lines))
    return path


def config(*train: Path, seed: int = 0, evaluation: tuple[Path, ...] = (), **data: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "run": {"seed": seed},
            "model": {"path": "unused"},
            "data": {"train": train, "evaluation": evaluation, "chat": False, **data},
        }
    )


def numbered(count: int) -> list[dict[str, Any]]:
    return [{"prompt": f"{n}+{n}=", "answer": 2 * n, "level": n % 3} for n in range(count)]


def test_a_line_becomes_a_prompt_with_everything_a_verifier_may_need(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    lines = [
        {"prompt": "2+3=", "answer": 5, "level": 1, "tags": ["x"], "note": None},
        {"messages": [{"role": "user", "content": "hi"}], "answer": " yes ", "verifier": "dapo_math", "id": 77},
    ]
    run = config(write(tmp_path / "train.jsonl", lines), shuffle=False, prompt_template="Q: {prompt} {x}")
    source = PromptSource(run, tokenizer)
    first, second = source.at(0), source.at(1)
    assert (first.prompt_id, first.text, first.answer, first.verifier) == (
        "train:1",
        "Q: 2+3= {x}",
        "5",
        "arithmetic",
    )
    assert first.extra == {"level": 1, "tags": ["x"]}
    assert first.tokens.dtype == np.int32
    assert first.tokens.tolist() == tokenizer.encode("Q: 2+3= {x}")
    assert (second.prompt_id, second.answer, second.verifier) == ("77", "yes", "dapo_math")
    assert source.verifiers == {"arithmetic", "dapo_math"}
    assert second.text == '<s>user: "hi" assistant:'
    assert second.tokens.tolist() == tokenizer.encode(second.text, add_special_tokens=False)


def test_messages_are_kept_for_a_reward_model_and_its_lines_need_no_answer(
    tmp_path: Path, tokenizer: TextTokenizer
) -> None:
    messages = [{"role": "user", "content": "hi"}]
    lines: list[dict[str, Any] | bytes] = [
        {"messages": messages, "level": 1},
        {"prompt": "2+3="},
        {"prompt": "2+3=", "verifier": "arithmetic"},
        {"prompt": "2+3=", "verifier": ["reward_model"]},
    ]
    path = write(tmp_path / "train.jsonl", lines)
    run = config(path, shuffle=False, verifier="reward_model")
    judged = run.model_copy(update={"reward": RewardSection.model_validate({"model": {"path": "judge"}})})
    source = PromptSource(judged, tokenizer)
    assert source.num_prompts == 2
    assert source.at(0).extra == {"level": 1, "messages": messages}
    assert (source.at(1).answer, source.at(1).extra) == ("", {})
    assert PromptSource(run, tokenizer).at(0).extra == {"level": 1}
    assert source.report.skipped == {SkipReason.MISSING_FIELD: 2}


def test_every_kind_of_broken_line_is_told_with_file_and_line_and_skipped(
    tmp_path: Path, tokenizer: TextTokenizer
) -> None:
    user = {"role": "user", "content": "hi"}
    broken: list[tuple[dict[str, Any] | bytes, SkipReason]] = [
        (b'{"prompt": "\xff", "answer": "1"}', SkipReason.INVALID_UTF8),
        (b'{"prompt": "a"', SkipReason.NOT_JSON),
        (b"17", SkipReason.NOT_AN_OBJECT),
        ({"answer": "1"}, SkipReason.MISSING_FIELD),
        ({"prompt": "a", "messages": [user], "answer": "1"}, SkipReason.MISSING_FIELD),
        ({"prompt": "a"}, SkipReason.MISSING_FIELD),
        ({"prompt": "a", "answer": None}, SkipReason.MISSING_FIELD),
        ({"prompt": 3, "answer": "1"}, SkipReason.WRONG_TYPE),
        ({"prompt": "a", "answer": [1]}, SkipReason.WRONG_TYPE),
        ({"prompt": "a", "answer": True}, SkipReason.WRONG_TYPE),
        ({"prompt": "a", "answer": "1", "verifier": 3}, SkipReason.WRONG_TYPE),
        ({"prompt": "a", "answer": "1", "id": []}, SkipReason.WRONG_TYPE),
        ({"prompt": "a", "answer": "1", "big": 10**30}, SkipReason.WRONG_TYPE),
        ({"prompt": "a", "answer": "1", "big": [{}] * 200_000}, SkipReason.TOO_LARGE),
        ({"prompt": "a", "answer": "1", "big": "x" * (3 << 20)}, SkipReason.TOO_LARGE),
        ({"messages": "hi", "answer": "1"}, SkipReason.WRONG_TYPE),
        ({"messages": [{"role": "user"}], "answer": "1"}, SkipReason.WRONG_TYPE),
        ({"messages": [], "answer": "1"}, SkipReason.EMPTY_PROMPT),
        ({"prompt": " \n", "answer": "1"}, SkipReason.EMPTY_PROMPT),
        ({"prompt": "a", "answer": "  "}, SkipReason.EMPTY_ANSWER),
        ({"prompt": "x" * 50, "answer": "1"}, SkipReason.OVERLONG),
        ({"prompt": "a", "answer": "1" * 21}, SkipReason.OVERLONG_ANSWER),
        ({"messages": [{"role": "tool", "content": "hi"}], "answer": "1"}, SkipReason.BAD_TEMPLATE),
        ({"prompt": "b", "answer": "1", "id": "good"}, SkipReason.DUPLICATE_ID),
    ]
    good: dict[str, Any] = {"prompt": "a", "answer": "1", "id": "good"}
    path = write(tmp_path / "train.jsonl", [good, *(line for line, _ in broken)])
    source = PromptSource(config(path, max_prompt_tokens=50, max_answer_chars=20), tokenizer)
    assert source.num_prompts == 1
    assert source.at(0).prompt_id == "good"
    report = source.report
    assert report.num_lines == len(broken) + 1
    assert sum(report.skipped.values()) == len(broken)
    expected: dict[SkipReason, list[int]] = {}
    for number, (_, reason) in enumerate(broken, start=2):
        expected.setdefault(reason, []).append(number)
    assert report.skipped == {reason: len(numbers) for reason, numbers in expected.items()}
    for reason, numbers in expected.items():
        assert [e.split(": ")[0] for e in report.examples[reason]] == [f"{path}:{n}" for n in numbers[:3]]
    assert "51 tokens; data.max_prompt_tokens is 50" in report.examples[SkipReason.OVERLONG][0]
    assert "21 characters; data.max_answer_chars is 20" in report.examples[SkipReason.OVERLONG_ANSWER][0]
    assert f"{path}:1" in report.examples[SkipReason.DUPLICATE_ID][0]
    assert any("skipped 1 (over-long prompt)" in line for line in report.lines())


def test_another_seed_reads_the_prompts_in_another_order(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    path = write(tmp_path / "train.jsonl", numbered(64))
    orders = []
    for seed in (0, 1, 2):
        source = PromptSource(config(path, seed=seed), tokenizer)
        orders.append([source.at(position).prompt_id for position in range(64)])
    assert len(set(map(tuple, orders))) == 3
    assert len({frozenset(order) for order in orders}) == 1, "each epoch has every prompt"


@given(seed=st.integers(0, 2**31), positions=st.lists(st.integers(0, 10_000), max_size=20))
@settings(max_examples=30)
def test_a_position_always_gives_the_same_prompt_and_an_epoch_gives_each_once(
    tmp_path_factory: pytest.TempPathFactory, tokenizer: TextTokenizer, seed: int, positions: list[int]
) -> None:
    path = write(tmp_path_factory.mktemp("data") / "train.jsonl", numbered(13))
    one, other = (PromptSource(config(path, seed=seed), tokenizer) for _ in range(2))
    assert one.digest == other.digest
    for position in positions:
        assert one.at(position).prompt_id == other.at(position).prompt_id
    for epoch in range(3):
        ids = {one.at(epoch * 13 + index).prompt_id for index in range(13)}
        assert ids == {f"train:{n}" for n in range(1, 14)}


def test_without_shuffling_the_order_is_that_of_the_files(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    paths = [write(tmp_path / folder / "train.jsonl", numbered(2)) for folder in ("a", "b")]
    source = PromptSource(config(*paths, shuffle=False), tokenizer)
    ids = [source.at(position).prompt_id for position in range(5)]
    assert ids == ["train:1", "train:2", "train#2:1", "train#2:2", "train:1"]


def test_held_out_prompts_keep_their_order_and_end(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    train, held_out = write(tmp_path / "t.jsonl", numbered(3)), write(tmp_path / "h.jsonl", numbered(4))
    source = PromptSource(config(train, evaluation=(held_out,)), tokenizer)
    assert source.num_evaluation_prompts == 4
    assert [source.evaluation_at(index).prompt_id for index in range(4)] == ["h:1", "h:2", "h:3", "h:4"]
    for index in (-1, 4):
        with pytest.raises(IndexError):
            source.evaluation_at(index)
    with pytest.raises(IndexError):
        source.at(-1)


def test_the_digest_tells_apart_whatever_changes_what_is_sampled(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    path = write(tmp_path / "train.jsonl", numbered(5))
    shorter = write(tmp_path / "other.jsonl", numbered(4))
    runs = [
        config(path),
        config(path, seed=1),
        config(path, shuffle=False),
        config(path, prompt_template="Q {prompt}"),
        config(path, verifier="dapo_math"),
        config(shorter),
        config(path, evaluation=(shorter,)),
    ]
    assert len({PromptSource(run, tokenizer).digest for run in runs}) == len(runs)
    unlimited = config(path, max_prompt_tokens=10_000)
    assert PromptSource(unlimited, tokenizer).digest == PromptSource(config(path), tokenizer).digest


@pytest.mark.parametrize(
    ("lines", "settings_", "error", "says"),
    [
        ([], {}, DataError, "no usable prompt"),
        ([b"\xff\xfe", b"garbage"], {}, DataError, r"train\.jsonl:2"),
        ([{"prompt": "a", "answer": ""}], {}, DataError, "the answer is empty"),
        (numbered(1), {"verifier": "aritmetic"}, ConfigError, "did you mean arithmetic"),
        ([{"prompt": "a", "answer": "1", "verifier": "dapo"}], {}, ConfigError, r"train\.jsonl:1: unknown verifier"),
        ([{"prompt": "a", "answer": "1", "verifier": "os:system"}], {}, ConfigError, r"jsonl:1: .*reward\.verifiers"),
        (numbered(1), {"prompt_template": "no hole"}, ConfigError, "must contain"),
    ],
)
def test_what_makes_a_whole_run_useless_is_refused(
    tmp_path: Path,
    tokenizer: TextTokenizer,
    lines: list[dict[str, Any] | bytes],
    settings_: dict[str, Any],
    error: type[Exception],
    says: str,
) -> None:
    path = write(tmp_path / "train.jsonl", lines)
    with pytest.raises(error, match=says):
        PromptSource(config(path, **settings_), tokenizer)


def test_an_empty_held_out_file_is_refused_too(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    train, empty = write(tmp_path / "t.jsonl", numbered(3)), write(tmp_path / "h.jsonl", [])
    with pytest.raises(DataError, match=r"no usable prompt in .*h\.jsonl"):
        PromptSource(config(train, evaluation=(empty,)), tokenizer)


# -- several sets, and patterns ------------------------------------------------------------------


def of_sets(*sets: dict[str, Any], seed: int = 0, **data: Any) -> RunConfig:
    return RunConfig.model_validate(
        {"run": {"seed": seed}, "model": {"path": "unused"}, "data": {"sets": sets, **data}}
    )


def test_sets_are_drawn_by_weight_with_columns_and_verifier_of_their_own(
    tmp_path: Path, tokenizer: TextTokenizer
) -> None:
    sums = write(tmp_path / "a" / "train.jsonl", numbered(4))
    words = write(tmp_path / "b" / "train.jsonl", [{"q": f"w{n}", "a": "x => yes"} for n in range(2)])
    mapped = {"question": "q", "answer": "a", "answer_after": "=>"}
    run = of_sets(
        {"name": "sums", "train": [sums], "weight": 3},
        {"name": "words", "train": [words], "columns": mapped, "verifier": "dapo_math"},
    )
    source = PromptSource(run, tokenizer)
    stream = [source.at(position) for position in range(16)]
    of_words = [prompt for prompt in stream if prompt.prompt_id.startswith("words/")]
    assert len(of_words) == 4
    assert [run.data.set_of(prompt.prompt_id) for prompt in of_words] == [run.data.sets[1]] * 4
    found = [run.data.set_of(f"{prefix}sums/1") for prefix in ("", "a/", "words")]
    assert found == [run.data.sets[0], None, None]
    assert {(prompt.answer, prompt.verifier) for prompt in of_words} == {("yes", "dapo_math")}
    assert {prompt.verifier for prompt in stream if prompt.prompt_id.startswith("sums/")} == {"arithmetic"}
    for first in (0, 8):
        ids = {prompt.prompt_id for prompt in stream[first : first + 8] if "sums" in prompt.prompt_id}
        assert ids >= {f"sums/train:{n}" for n in (1, 2, 3, 4)}, "every epoch of a set has each of its prompts"
    assert source.num_prompts == 6
    assert source.verifiers == {"arithmetic", "dapo_math"}
    again = PromptSource(run, tokenizer)
    assert [again.at(n).prompt_id for n in (13, 2)] == [stream[n].prompt_id for n in (13, 2)]
    assert again.digest == source.digest


def test_other_weights_are_another_stream(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    paths = [write(tmp_path / name, numbered(3)) for name in ("a.jsonl", "b.jsonl")]
    digests = {
        PromptSource(
            of_sets(*({"name": p.stem, "train": [p], "weight": w} for p, w in zip(paths, ws, strict=True))), tokenizer
        ).digest
        for ws in ((1, 1), (1, 2), (1, 0))
    }
    assert len(digests) == 3


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"sets": [{"name": "a", "train": ["x"], "weight": 0}]}, "the weights of data.sets sum to 0"),
        ({"sets": [{"name": "a", "train": ["x"], "weight": -1}]}, "greater than or equal to 0"),
        ({"sets": [{"name": "a", "train": ["x"]}, {"name": "a", "train": ["y"]}]}, "a different name"),
        ({"sets": [{"name": "a/b", "train": ["x"]}, {"name": "a", "train": ["y"]}]}, "names a and a/b, but prompt ids"),
        ({"sets": [{"name": "a", "train": ["x"]}], "train": ["y"]}, "both given"),
        ({}, "both missing"),
        ({"train": ["hf://models/a/b"]}, "hf://datasets/OWNER/NAME"),
    ],
)
def test_sets_that_contradict_themselves_are_refused(data: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        RunConfig.model_validate({"model": {"path": "unused"}, "data": data})


def test_a_pattern_is_its_files_in_order_and_a_run_keeps_their_names(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    names = ["part-1.jsonl", "part-0.jsonl", "sub/part-2.jsonl"]
    for name in names:
        write(tmp_path / "data" / "deep" / name if "/" not in name else tmp_path / "data" / name, numbered(2))
    run = config(tmp_path / "data" / "**" / "part-*.jsonl", evaluation=(tmp_path / "data" / "sub" / "*",))
    pinned = pin_data(run)
    assert [Path(path).name for path in pinned.data.train] == ["part-0.jsonl", "part-1.jsonl", "part-2.jsonl"]
    assert [Path(path).name for path in pinned.data.evaluation] == ["part-2.jsonl"]
    assert PromptSource(run, tokenizer).digest == PromptSource(pinned, tokenizer).digest
    write(tmp_path / "data" / "sub" / "part-3.jsonl", numbered(1))
    assert pin_data(pinned) is pinned
    with pytest.raises(DataError, match=r"none-\*.jsonl: no file matches"):
        pin_data(config(tmp_path / "none-*.jsonl"))


def test_evaluation_sets_have_columns_verifiers_and_ids_of_their_own(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    train = write(tmp_path / "train.jsonl", numbered(2))
    own = write(tmp_path / "held.jsonl", [{"prompt": "a", "answer": "1", "id": 7}])
    aime = write(tmp_path / "aime.jsonl", [{"q": "b", "gold": "2", "id": 7}, {"q": "c", "gold": "3"}])
    columns = {"question": "q", "answer": "gold"}
    sets = [{"name": "aime", "files": [tmp_path / "aime*.jsonl"], "columns": columns, "verifier": "dapo_math"}]
    run = config(train, evaluation=(own,)).model_copy(
        update={"evaluation": EvaluationSection.model_validate({"sets": sets})}
    )
    assert pin_data(run).evaluation.sets[0].files == (aime,)
    source = PromptSource(run, tokenizer)
    digests = [each.digest for each in source.evaluation_sets]
    assert source.evaluation_sets == (HeldOutSource("", 0, 1, digests[0]), HeldOutSource("aime", 1, 2, digests[1]))
    assert len({*digests}) == 2
    held_out = [source.evaluation_at(index) for index in range(3)]
    assert [prompt.prompt_id for prompt in held_out] == ["7", "aime/7", "aime/aime:2"]
    assert [(prompt.answer, prompt.verifier) for prompt in held_out[1:]] == [("2", "dapo_math"), ("3", "dapo_math")]
    assert "dapo_math" in source.verifiers


def test_sets_of_one_size_and_epochs_of_one_set_come_in_orders_of_their_own(
    tmp_path: Path, tokenizer: TextTokenizer
) -> None:
    """Shuffled alike, lines of one number would always come together, or in one order for ever."""
    sets = [{"name": name, "train": [write(tmp_path / f"{name}.jsonl", numbered(24))]} for name in ("a", "b", "c")]
    run = RunConfig.model_validate({"model": {"path": "unused"}, "data": {"sets": sets}})
    source = PromptSource(run, tokenizer)
    drawn = [source.at(position) for position in range(2 * 3 * 24)]
    orders: list[tuple[str, ...]] = []
    for name in ("a", "b", "c"):
        lines = [prompt.text for prompt in drawn if prompt.prompt_id.startswith(f"{name}/")]
        assert sorted(lines[:24]) == sorted(lines[24:]), "each line once an epoch"
        orders += [tuple(lines[:24]), tuple(lines[24:])]
    assert len(set(orders)) == 6


# -- a curriculum ----------------------------------------------------------------------------------


def graded(count: int) -> list[dict[str, Any]]:
    return [{"prompt": f"{n}", "answer": "1", "difficulty": (n * 7 % count) / count} for n in range(count)]


def test_a_curriculum_goes_from_easy_to_hard_in_every_epoch_and_is_shuffled_within(
    tmp_path: Path, tokenizer: TextTokenizer
) -> None:
    path = write(tmp_path / "train.jsonl", graded(50))
    source = PromptSource(config(path, curriculum="easy-first"), tokenizer)
    orders = set[tuple[int, ...]]()
    for epoch in range(2):
        grades = [source.at(position).extra["difficulty"] for position in range(50 * epoch, 50 * (epoch + 1))]
        assert sorted(grades) == [n / 50 for n in range(50)], "each prompt once"
        stages = [grades[start : start + 5] for start in range(0, 50, 5)]
        assert all(max(stage) < min(later) for stage, later in pairwise(stages))
        assert any(stage != sorted(stage) for stage in stages)
        orders |= {tuple(sorted(range(5), key=stage.__getitem__)) for stage in stages}
    assert len(orders) > 10, "each stage of each epoch has an order of its own"
    assert PromptSource(config(path), tokenizer).digest != source.digest
    in_order = PromptSource(config(path, curriculum="easy-first", shuffle=False), tokenizer)
    assert [in_order.at(n).extra["difficulty"] for n in range(50)] == [n / 50 for n in range(50)]


def test_prompts_outside_the_limits_of_difficulty_or_without_one_are_skipped(
    tmp_path: Path, tokenizer: TextTokenizer
) -> None:
    odd: list[dict[str, Any]] = [{"prompt": "x", "answer": "1"}, {"prompt": "y", "answer": "1", "difficulty": "hard"}]
    path = write(tmp_path / "train.jsonl", [*graded(10), *odd])
    source = PromptSource(config(path, min_difficulty=0.2, max_difficulty=0.7), tokenizer)
    assert source.num_prompts == 6
    expected = {SkipReason.OUT_OF_RANGE: 4, SkipReason.MISSING_FIELD: 1, SkipReason.WRONG_TYPE: 1}
    assert source.report.skipped == expected
    assert PromptSource(config(path), tokenizer).num_prompts == 12, "unread, a difficulty may be anything"
    mapped = write(tmp_path / "mapped.jsonl", [{"prompt": "x", "answer": "1", "m": {"hard": 3}}])
    source = PromptSource(config(mapped, curriculum="easy-first", columns={"difficulty": "m.hard"}), tokenizer)
    assert source.at(0).extra["difficulty"] == 3
    with pytest.raises(ValueError, match="min_difficulty is 2"):
        config(path, min_difficulty=2, max_difficulty=1)


def test_equal_held_out_prompts_have_one_digest_wherever_they_lie(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    train = write(tmp_path / "train.jsonl", numbered(2))
    rows = [{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": "2"}]

    def digest(name: str, *held_out: dict[str, str]) -> str:
        own = write(tmp_path / name, list(held_out))
        return PromptSource(config(train, evaluation=(own,)), tokenizer).evaluation_sets[0].digest

    assert digest("one.jsonl", *rows) == digest("two.jsonl", *rows)
    assert digest("three.jsonl", rows[0], rows[1] | {"answer": "3"}) != digest("one.jsonl", *rows)
    assert digest("four.jsonl", *reversed(rows)) != digest("one.jsonl", *rows), "places count"


def test_an_environment_gets_every_column_by_its_name_also_those_that_are_prompt_and_answer(
    tmp_path: Path, tokenizer: TextTokenizer
) -> None:
    rows = [{"question": "2+3", "solution": "5", "level": 1}, {"prompt": "2+3=", "answer": 5}, {"secret": 8}]
    files = [write(tmp_path / f"{number}.jsonl", [row]) for number, row in enumerate(rows)]
    section = EnvironmentSection(path="mine:Class")
    run = config(*files, shuffle=False).model_copy(update={"environment": section})
    source = PromptSource(run, tokenizer)
    seen = [row_of(source.at(place)) for place in range(3)]
    assert seen[0] | rows[0] | {"answer": "5"} == seen[0]
    assert (seen[1]["messages"], seen[1]["answer"]) == ([{"role": "user", "content": "2+3="}], "5")
    assert (seen[2]["secret"], seen[2]["messages"]) == (8, [])
