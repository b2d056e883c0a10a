"""Claims about the task and the start model of learning from guidance."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest
import torch
from transformers import Qwen3ForCausalLM

from ops.demo import guided, guided_responses
from ops.demo.guided import Fault, err, first_fault, first_fault_of, problems, read_template
from ops.demo.guided_responses import GuidedSample, draw_samples
from ops.demo.make_guided_model import SYMBOLS, measure
from ops.demo.make_tiny_model import build_tokenizer
from ops.demo.task import Problem, Split, draw, write_response


@pytest.fixture(scope="module")
def samples() -> list[GuidedSample]:
    return draw_samples(64, seed=3)


def test_the_example_in_the_documentation_is_true():
    problem = Problem(7, ("+5", "-9", "+0", "+1", "-2", "+3", "+4", "-8"))
    assert f"prompt      {problem.prompt}\n" in (guided.__doc__ or "")
    assert f"response    {write_response(problem.counter)}\n" in (guided.__doc__ or "")
    fault = first_fault(problem, (7, 2, 7, *problem.counter[3:]))
    assert fault is not None
    assert f"judgment    {fault.judgment}\n" in (guided.__doc__ or "")


def test_an_error_that_is_put_in_is_the_first_one_found():
    rng = random.Random(0)
    for _ in range(300):
        problem = draw(rng, Split.TRAIN, rng.randint(3, 9))
        step = rng.randint(2, problem.num_terms)
        expected = problem.counter[step - 1]
        fault = Fault(step, (expected + rng.randint(1, 9)) % 10, expected)
        assert first_fault_of(problem, write_response(err(problem, rng, fault))) == fault
        assert first_fault_of(problem, write_response(problem.counter)) is None


def test_the_demonstrator_is_wrong_at_borrows_alone_and_mostly_there():
    rng = random.Random(1)
    found = [(problem, first_fault(problem, err(problem, rng))) for problem in problems(Split.TRAIN, 400, seed=1)]
    for problem, fault in found:
        if fault is not None:
            before = problem.counter[fault.step - 2]
            assert before + int(problem.changes[fault.step - 2]) == -fault.said < 0
    with_borrow = [fault is not None for problem, fault in found if problem.num_borrows]
    assert 0.7 < sum(with_borrow) / len(with_borrow) < 0.9


def test_held_out_chains_are_never_asked_in_training():
    asked = {problem.prompt for problem in problems(Split.TRAIN, 500, seed=0)}
    held_out = [problem.prompt for problem in problems(Split.HELD_OUT, 500, seed=0)]
    assert len(set(held_out)) == 500
    assert asked.isdisjoint(held_out)


def test_the_card_states_what_the_committed_model_does():
    torch.set_num_threads(1)
    model = Qwen3ForCausalLM.from_pretrained(guided.MODEL).eval()
    measured = measure(model, build_tokenizer(SYMBOLS), 128)
    card = (guided.MODEL / "README.md").read_text()
    stated = [float(share) / 100 for share in re.findall(r"\| ([\d.]+)% \|", card)]
    found = (measured.greedy, measured.sampled, measured.standard, measured.followed)
    assert found == pytest.approx(stated, abs=0.08)
    assert measured.greedy < 0.3
    assert min(measured.standard, measured.followed) > 0.9
    assert sum(path.stat().st_size for path in guided.MODEL.iterdir()) < 1_000_000


def test_both_templates_end_in_the_question_and_have_their_slot():
    assert read_template("standard").endswith("{question}")
    assert read_template("judge").endswith("{question}")
    assert "{gold}" in read_template("standard")
    assert "{judgment}" in read_template("judge")
    assert set(read_template("standard") + read_template("judge")) - set("{}") <= set(SYMBOLS)


def test_a_wrong_response_has_a_judgment_that_quotes_it_and_a_right_one_none(samples: list[GuidedSample]):
    assert 0 < sum(sample.is_right for sample in samples) < len(samples) / 2
    for sample in samples:
        assert sample.is_right == sample.text.endswith(f"={sample.problem.answer}")
        if sample.is_right:
            assert not sample.judgment
        elif sample.fault is not None:
            assert sample.text[2 * sample.fault.step - 1] == str(sample.fault.said)
            assert sample.judgment == sample.fault.judgment


def test_the_same_seed_writes_the_same_response_file_and_another_seed_another(tmp_path: Path):
    for name, seed in (("one", 0), ("again", 0), ("other", 1)):
        arguments = ["--out", str(tmp_path / name), "--responses", "12", "--heldout", "20", "--seed", str(seed)]
        guided_responses.main(arguments)
    one, again, other = (tmp_path / name / "responses.jsonl" for name in ("one", "again", "other"))
    assert one.read_bytes() == again.read_bytes() != other.read_bytes()
    lines = [json.loads(line) for line in one.read_text().splitlines()]
    assert len(lines) == 12
    assert all({"prompt", "answer", "response", "verdict"} <= set(line) for line in lines)
    assert any("judgment" in line for line in lines)
