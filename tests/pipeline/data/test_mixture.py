"""Claims about several data sets as one stream."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.data.mixture import Mixture


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 50), min_size=1, max_size=6).filter(any), st.integers(0, 5000))
def test_each_set_has_its_share_of_any_stretch_and_every_place_once(weights: list[int], start: int) -> None:
    mixture = Mixture([float(weight) for weight in weights])
    stretch = [mixture.at(position) for position in range(start, start + 500)]
    assert len(set(stretch)) == 500
    drawn = Counter(chosen for chosen, _ in stretch)
    for number, weight in enumerate(weights):
        share = 500 * weight / sum(weights)
        assert abs(drawn[number] - share) <= len(weights) + 1.5
        places = sorted(place for chosen, place in stretch if chosen == number)
        assert places == list(range(places[0], places[0] + len(places))) if places else weight <= share


def test_one_set_is_the_stream_itself_and_a_set_of_weight_0_never_comes() -> None:
    assert [Mixture([3.0]).at(n) for n in range(3)] == [(0, 0), (0, 1), (0, 2)]
    assert {Mixture([1.0, 0.0]).at(n)[0] for n in range(2000)} == {0}


def test_a_rare_set_comes_at_all() -> None:
    assert 1 in {Mixture([1.0, 1e-9]).at(n)[0] for n in range(1100)}


@pytest.mark.parametrize("weights", [[0.0, 0.0], [1.0, -1.0], []])
def test_weights_that_sum_to_nothing_or_are_negative_are_refused(weights: list[float]) -> None:
    with pytest.raises(ValueError, match="weights"):
        Mixture(weights)
