"""Claims about the number of standbys."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.supervisor.standbys.number import DAY_S, chances, measured_rate, num_standbys


@pytest.mark.parametrize(
    ("refill_s", "numbers"), [(DAY_S, (1, 1, 2, 7, 35)), (3600.0, (0, 0, 1, 1, 4))], ids=["a day", "an hour"]
)
def test_the_number_is_that_of_the_published_table(refill_s: float, numbers: tuple[int, ...]):
    rate_per_day = 2.3 / 1000
    fleets = (8, 32, 128, 1024, 10000)
    assert tuple(num_standbys(workers, rate_per_day, refill_s) for workers in fleets) == numbers


@pytest.mark.parametrize(("workers", "number"), [(128, 2), (256, 2), (512, 3), (1024, 4)])
def test_the_number_is_that_of_the_paper_at_its_failure_probability(workers: int, number: int):
    assert num_standbys(workers, -math.log1p(-0.0012), DAY_S) == number


@given(st.integers(0, 60), st.floats(1e-6, 0.999), st.sampled_from([0.5, 0.9, 0.99]))
def test_the_number_is_the_least_that_suffices(workers: int, p: float, confidence: float):
    k = num_standbys(workers, -math.log1p(-p), DAY_S, confidence=confidence)

    def within(most: int) -> float:
        return math.fsum(math.comb(workers, i) * p**i * (1 - p) ** (workers - i) for i in range(most + 1))

    assert 0 <= k <= workers
    assert within(k) >= confidence - 1e-9
    assert k == 0 or within(k - 1) < confidence + 1e-9


def test_the_chances_are_those_of_the_binomial_distribution():
    rate = -math.log1p(-0.25)
    assert list(chances(3, rate, DAY_S)) == pytest.approx([27 / 64, 27 / 64, 9 / 64, 1 / 64])
    assert list(chances(2, 0.0, DAY_S)) == [1.0, 0.0, 0.0] and list(chances(2, 1e9, DAY_S)) == [0.0, 0.0, 1.0]
    assert math.fsum(chances(10_000, 0.1, DAY_S)) == pytest.approx(1.0)


def test_a_rate_of_nothing_needs_none_and_a_certain_one_all():
    assert (num_standbys(100, 0.0, DAY_S), num_standbys(0, 1.0, DAY_S)) == (0, 0)
    assert num_standbys(100, 1e9, DAY_S) == 100


def test_the_run_s_own_rate_counts_from_three_repairs_on_and_never_lowers_the_number():
    assert measured_rate(0.002, 2, 8, 600.0) == 0.002
    assert measured_rate(0.002, 4, 8, 3600.0) == pytest.approx(4 * 24 / 8)
    assert measured_rate(0.002, 3, 1000, 1e9) == 0.002
