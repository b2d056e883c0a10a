"""Claims about the real-size run's parts that need no model."""

from __future__ import annotations

import random

from ops.bench.real_size.__main__ import Figures, trouble_in
from ops.bench.real_size.material import write_problem
from ops.bench.real_size.verifier import judge
from pipeline.rewards.verifier import Response
from protocol.trajectory import FinishReason


def test_problems_are_as_long_as_grade_school_word_problems_and_repeat_by_seed() -> None:
    problems = [write_problem(random.Random(seed)) for seed in range(300)]
    lengths = [len(problem.split()) for problem in problems]
    assert 35 <= sum(lengths) / len(lengths) <= 60
    assert write_problem(random.Random(7)) == problems[7]
    assert len(set(problems)) == 300


def test_about_half_of_all_responses_are_right_so_that_groups_have_signal() -> None:
    responses = [
        Response(
            prompt_text="", response_text=f"text {number}", answer="", verifier="", extra={}, num_tokens=1,
            finish_reason=FinishReason.LENGTH, model_score=None,
        )
        for number in range(400)
    ]  # fmt: skip
    assert 160 <= sum(judge(responses)) <= 240


def test_a_worker_that_was_replaced_or_an_update_that_was_lost_fails_the_run() -> None:
    line = "[error    ] worker_replaced   at=2026 reason='at compute without progress for 61 s' worker=learner"
    assert trouble_in(f"08:00:00 running 0:05: update 0\n{line}\n") == [" ".join(line.split())]
    well = Figures("run", updates_s=[1.0, 1.0], kept_updates=2)
    assert well.is_well
    assert not Figures("run", updates_s=[1.0, 1.0], kept_updates=1).is_well
    assert not Figures("run", updates_s=[1.0], kept_updates=1, trouble=[line]).is_well
