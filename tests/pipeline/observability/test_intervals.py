"""Claims about intervals of means."""

from __future__ import annotations

import pytest

from pipeline.observability.estimates import Estimate, difference_of, mean_of, overlap, paired_difference, t_quantile


@pytest.mark.parametrize(
    ("freedom", "quantile"),
    [(1, 12.7062), (2, 4.3027), (4, 2.7764), (10, 2.2281), (11, 2.2010), (20, 2.0860), (30, 2.0423), (1000, 1.9623)],
)
def test_quantiles_of_t_are_those_of_the_tables(freedom: int, quantile: float) -> None:
    assert t_quantile(freedom) == pytest.approx(quantile, abs=2e-4)


def test_broken_degrees_of_freedom_count_as_the_whole_number_below() -> None:
    assert t_quantile(2.9) == t_quantile(2)
    with pytest.raises(ValueError, match="at least 1"):
        t_quantile(0.5)


def test_a_mean_has_the_t_interval_of_its_observations() -> None:
    # scipy.stats.t.interval(0.95, 2, loc=0.9, scale=sem)
    found = mean_of([0.88, 0.90, 0.92])
    assert found is not None
    assert (found.value, found.low, found.high) == pytest.approx((0.90, 0.850317, 0.949683), abs=1e-5)
    assert mean_of([0.9]) is None


def test_pairs_take_out_what_prompts_have_in_common() -> None:
    ones: list[float | None] = [0.0, 1.0, 0.0, 1.0, 0.0, None, 1.0]
    others: list[float | None] = [1.0, 1.0, 0.0, 1.0, 1.0, 1.0]
    found = paired_difference(ones, others)
    assert found is not None
    estimate, number = found
    assert number == 5, "places without a pair are left out"
    # differences 1, 0, 0, 0, 1: mean 0.4, deviation 0.5477, t of 4
    assert (estimate.value, estimate.low, estimate.high) == pytest.approx((0.4, -0.28007, 1.08007), abs=1e-4)
    assert paired_difference([1.0], [0.0]) is None


def test_welch_s_interval_is_that_of_the_textbook() -> None:
    found = difference_of([27.5, 21.0, 19.0, 23.6], [27.1, 22.0, 20.8, 23.4, 25.0])
    assert found is not None
    # variances 13.4692 and 6.158, so an error of 2.1445; 5.09 degrees of freedom, taken as 5
    assert (found.value, found.low, found.high) == pytest.approx((0.885, -4.6277, 6.3977), abs=1e-3)
    assert difference_of([1.0], [1.0, 2.0]) is None


def test_observations_without_scatter_have_no_interval() -> None:
    assert difference_of([0.5, 0.5], [0.7, 0.7]) is None
    assert mean_of([0.9, 0.9]) is None
    assert paired_difference([0.0, 0.0], [1.0, 1.0]) is None


def test_intervals_overlap_when_they_have_a_point_in_common() -> None:
    assert overlap(Estimate(0.5, 0.4, 0.6), Estimate(0.65, 0.6, 0.7))
    assert not overlap(Estimate(0.5, 0.4, 0.6), Estimate(0.7, 0.61, 0.8))
