"""Claims about judgments with noise: the share is met, the rest is right, and repeats agree."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest

from ops.bench.noisy_judgments import half, noisy, tenth, three_tenths
from ops.demo.task import Split, draw, write_response
from pipeline.config.learning import RewardSection
from pipeline.rewards.judgments.by_arithmetic import judgments
from pipeline.rewards.pool import VerifierPool
from pipeline.rewards.verifier import Response


def wrong_responses(number: int) -> list[Response]:
    """Return responses with one wrong step, which later steps follow."""
    rng = random.Random(1)
    made: list[Response] = []
    for _ in range(number):
        problem = draw(rng, Split.TRAIN, 6)
        place, gap = rng.randrange(6), rng.randint(1, 9)
        counter = [shown if i < place else (shown + gap) % 10 for i, shown in enumerate(problem.counter)]
        text = write_response(counter)
        made.append(
            Response(prompt_text=problem.prompt, response_text=text, answer=problem.answer, verifier="arithmetic")
        )
    return made


@pytest.mark.parametrize(("function", "share"), [(tenth, 0.1), (three_tenths, 0.3), (half, 0.5)])
def test_the_share_of_judgments_that_name_another_step_is_met(
    function: Callable[[Sequence[Response]], list[str | None]], share: float
) -> None:
    responses = wrong_responses(2000)
    right, said = judgments(responses), function(responses)
    steps = [[str(text).partition(" says ")[0] for text in texts] for texts in (right, said)]
    differ = [a != b for a, b in zip(*steps, strict=True)]
    assert sum(differ) / len(differ) == pytest.approx(share, abs=0.03)
    assert all((a == b) is not other for a, b, other in zip(right, said, differ, strict=True))
    assert function(responses) == said, "repeats agree"
    assert noisy(share, seed=1)(responses) != said


def test_a_false_judgment_quotes_a_digit_of_that_step_and_another_value() -> None:
    for response in wrong_responses(200):
        (said,) = noisy(1.0)([response])
        step, _, rest = str(said).removeprefix("step ").partition(" says ")
        quoted, _, should_be = rest.partition(", should be ")
        digits = [text for text in response.response_text if text.isdigit()]
        assert digits[int(step) - 1] == quoted != should_be


async def test_a_run_may_name_it_as_a_function_of_its_own() -> None:
    responses = wrong_responses(3)
    async with VerifierPool(RewardSection(timeout_s=10.0)) as pool:
        found = await pool.judgments("ops.bench.noisy_judgments:half", responses)
    assert [getattr(one, "reason", "") for one in found] == half(responses)
