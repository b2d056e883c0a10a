"""Claims about the demo's task: repeatable, right, apart, heavy-tailed."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest

from ops.demo import task as demo_task
from ops.demo.task import MAX_RESPONSE_TOKENS, Problem, Split, draw, generate, write_response
from pipeline.rewards.arithmetic import verify
from pipeline.rewards.verifier import Response, Verdict


def evaluate(prompt: str) -> str:
    """Work a prompt out another way than the generator: as one sum, reduced once."""
    assert re.fullmatch(r"a\d([b-z][+-]\d)+=", prompt)
    return str(eval(re.sub("[a-z]", "", prompt).removesuffix("=")) % 10)


def accuracy(problem: Problem, response: str) -> float:
    (outcome,) = verify(
        [Response(prompt_text=problem.prompt, response_text=response, answer=problem.answer, verifier="arithmetic")]
    )
    assert isinstance(outcome, Verdict)
    return outcome.accuracy


def read(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data")
    demo_task.main(["--out", str(path)])
    return path


def test_the_example_in_the_documentation_is_true():
    problem = Problem(start=7, changes=("+5", "-9", "+0"))
    assert problem.prompt == "a7b+5c-9d+0="
    assert problem.counter == (7, 2, 3, 3)
    assert problem.num_borrows == 1
    assert write_response(problem.counter) == "a7b2c3d3=3"
    assert problem.prompt in (demo_task.__doc__ or "")


def test_the_same_seed_gives_the_same_bytes_and_another_seed_others(folder: Path, tmp_path: Path):
    demo_task.main(["--out", str(tmp_path / "again")])
    demo_task.main(["--out", str(tmp_path / "other"), "--seed", "1"])
    for name in ("train.jsonl", "heldout.jsonl"):
        assert (folder / name).read_bytes() == (tmp_path / "again" / name).read_bytes()
        assert (folder / name).read_bytes() != (tmp_path / "other" / name).read_bytes()


def test_every_answer_is_what_an_independent_evaluation_gives(folder: Path):
    for name in ("train.jsonl", "heldout.jsonl"):
        for row in read(folder / name):
            assert row["answer"] == evaluate(str(row["prompt"]))
            assert row["verifier"] == "arithmetic"
            assert row["difficulty"] == len(re.findall("[a-z]", str(row["prompt"])))


def test_the_verifier_accepts_a_correct_response_and_refuses_every_other_digit():
    problem = draw(random.Random(3), Split.TRAIN, num_terms=5)
    response = write_response(problem.counter)
    assert accuracy(problem, response) == 1.0
    for digit in set("0123456789") - {problem.answer}:
        assert accuracy(problem, response[:-1] + digit) == 0.0


def test_no_held_out_prompt_is_a_training_prompt_whatever_the_seeds(folder: Path):
    train = {row["prompt"] for row in read(folder / "train.jsonl")}
    heldout = [row["prompt"] for row in read(folder / "heldout.jsonl")]
    assert len(heldout) == len(set(heldout)) >= 256
    assert len(train) == 4096
    assert train.isdisjoint(heldout)
    other_seed = {problem.prompt for problem in generate(Split.TRAIN, 2000, seed=99)}
    assert other_seed.isdisjoint(heldout)


def test_the_99th_percentile_of_correct_lengths_is_at_least_four_times_the_median():
    for seed in range(3):
        for split, num_prompts in ((Split.TRAIN, 4096), (Split.HELD_OUT, 512)):
            lengths = sorted(len(write_response(p.counter)) + 1 for p in generate(split, num_prompts, seed))
            median, p99 = lengths[len(lengths) // 2], lengths[len(lengths) * 99 // 100]
            assert p99 >= 4 * median
            assert lengths[-1] <= MAX_RESPONSE_TOKENS


def test_asking_for_more_prompts_than_there_are_is_refused_with_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    # about 25 held-out prompts have two terms
    with pytest.raises(SystemExit) as ending:
        demo_task.main(["--out", str(tmp_path), "--train", "1", "--heldout", "200", "--min-terms", "2"])
    assert ending.value.code == 2
    assert "ask for fewer" in capsys.readouterr().err
