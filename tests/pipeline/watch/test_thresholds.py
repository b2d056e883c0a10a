"""Claims about thresholds by fleet size, and about the strengths that they are fitted to."""

from __future__ import annotations

import numpy as np
import pytest

from pipeline.watch.calibration import largest_strengths
from pipeline.watch.thresholds import ALPHA, Tail, fit, fleet_factor
from tests.pipeline.watch.fleets import fleet


def test_the_fit_of_an_exponential_tail_finds_it() -> None:
    drawn = np.random.default_rng(0).exponential(0.1, 200_000)
    tail = fit(drawn)
    assert tail.slope == pytest.approx(0.1, rel=0.1)
    assert tail.start == pytest.approx(-0.1 * np.log(tail.share), rel=0.05)


def test_a_fleet_exceeds_its_strength_in_the_promised_share_of_windows() -> None:
    drawn = np.random.default_rng(1).exponential(0.1, (20_000, 50))
    limit = fit(drawn.ravel()).strength(50)
    assert np.mean(drawn.max(axis=1) > limit) == pytest.approx(ALPHA, rel=0.3)


def test_a_larger_fleet_needs_more_and_a_small_one_no_less() -> None:
    assert Tail(0.5, 0.1).strength(1000) > Tail(0.5, 0.1).strength(100)
    assert fleet_factor(1) >= 1.0
    assert fleet_factor(10_000) > fleet_factor(1024) > 1.0


def test_few_strengths_are_refused() -> None:
    with pytest.raises(ValueError, match="expected at least 100"):
        fit(np.zeros(20))


def test_healthy_workers_stay_below_an_alarm() -> None:
    strengths = largest_strengths(fleet(8, seconds=300))
    assert len(strengths) == 8
    assert strengths.max() < 1.0
