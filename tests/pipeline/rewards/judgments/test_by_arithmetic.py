"""Claims about judgments of chains: the first wrong step is named, quoted and put right."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ops.demo.guided import NUM_TERMS, err, first_fault
from ops.demo.task import Split, draw, write_response
from pipeline.rewards.judgments.by_arithmetic import chain_of, first_wrong_step, judgments
from pipeline.rewards.verifier import Response


def judgment(prompt: str, response: str) -> str | None:
    (text,) = judgments([Response(prompt_text=prompt, response_text=response, answer="", verifier="arithmetic")])
    return text


def carried_on(counter: list[int], step: int, said: int) -> list[int]:
    """Return the counter with an error at ``step``, from which the later steps follow."""
    gap = said - counter[step]
    return [shown if i < step else (shown + gap) % 10 for i, shown in enumerate(counter)]


def as_it_was(counter: list[int], step: int, said: int) -> list[int]:
    return [said if i == step else shown for i, shown in enumerate(counter)]


@given(
    seed=st.integers(0, 10**6),
    num_terms=st.integers(2, 26),
    after=st.sampled_from([carried_on, as_it_was]),
    place=st.floats(0.0, 1.0, exclude_max=True),
    shift=st.integers(1, 9),
)
def test_one_error_in_a_chain_is_named_and_a_right_chain_has_no_judgment(
    seed: int, num_terms: int, after: Callable[[list[int], int, int], list[int]], place: float, shift: int
) -> None:
    problem = draw(random.Random(seed), Split.TRAIN, num_terms)
    counter = list(problem.counter)
    assert judgment(problem.prompt, write_response(counter)) is None
    step = int(place * num_terms)
    said = (counter[step] + shift) % 10
    wrong = write_response(after(counter, step, said))
    assert judgment(problem.prompt, wrong) == f"step {step + 1} says {said}, should be {counter[step]}"


@given(seed=st.integers(0, 10**6))
def test_a_demonstrators_errors_get_the_judgments_that_the_guided_model_was_taught(seed: int) -> None:
    rng = random.Random(seed)
    problem = draw(rng, Split.TRAIN, NUM_TERMS)
    counter = err(problem, rng)
    fault = first_fault(problem, counter)
    assert judgment(problem.prompt, write_response(counter)) == (None if fault is None else fault.judgment)


@pytest.mark.parametrize(
    ("response", "says"),
    [
        ("a7b2c3d3=4", "step 5 says 4, should be 3"),
        ("a7b12c3d3=3", "step 2 says 12, should be 2"),
        ("a7b2d3=3", "step 3 says d3, should be c3"),
        ("a7b2c3=3", "step 4 says =3, should be d3"),
        ("a7b2c3d3e3=3", "step 5 says e3, should be =3"),
        ("a7b2c3dd3=3", "step 4 says d, should be d3"),
        ("a7b2c3d3", "step 5 says nothing, should be =3"),
        ("a7b2c3d3=3 or 4", "step 5 says o, should be the end"),
        ("", "step 1 says nothing, should be a7"),
    ],
)
def test_a_chain_that_loses_its_form_is_wrong_where_it_loses_it(response: str, says: str) -> None:
    assert judgment("a7b+5c-9d+0=", response) == says


def test_a_term_may_multiply_and_a_template_may_stand_before_the_chain() -> None:
    assert judgment("Go on: a3b*4c-7=", "a3b2c5=5") is None
    assert judgment("Go on: a3b*4c-7=", "a3b3c6=6") == "step 2 says 3, should be 2"
    assert chain_of("What is 2+3=") == chain_of("a7=") == []


@given(st.text(alphabet="abc0123456789=+- x", max_size=30))
def test_any_text_gets_a_step_within_the_chain_or_none(text: str) -> None:
    wrong = first_wrong_step(chain_of("a7b+5c-9="), text)
    assert (wrong is None) == (text.strip() == "a7b2c3=3")
    assert wrong is None or 1 <= wrong.number <= 4
