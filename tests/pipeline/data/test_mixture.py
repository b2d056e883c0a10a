"""Claims about several data sets as one stream."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.data.mixture import Mixture, permuted


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


sizes = st.integers(1, 300)
seeds = st.integers(0, 2**63)
epochs = st.integers(0, 1000)


def order(size: int, seed: int, epoch: int) -> list[int]:
    return [permuted(index, size, seed=seed, epoch=epoch) for index in range(size)]


@given(sizes, seeds, epochs)
def test_an_epoch_visits_every_prompt_once(size: int, seed: int, epoch: int) -> None:
    assert sorted(order(size, seed, epoch)) == list(range(size))


@given(st.integers(50, 300), seeds, epochs)
def test_epochs_and_seeds_have_orders_of_their_own(size: int, seed: int, epoch: int) -> None:
    first = order(size, seed, epoch)
    assert first != list(range(size))
    assert first != order(size, seed, epoch + 1)
    assert first != order(size, seed + 1, epoch)


@given(st.integers(1, 2**40), seeds, st.data())
def test_a_huge_range_needs_no_table(size: int, seed: int, data: st.DataObject) -> None:
    index = data.draw(st.integers(0, size - 1))
    assert 0 <= permuted(index, size, seed=seed, epoch=3) < size


def test_the_order_is_the_same_for_ever() -> None:
    assert order(10, seed=7, epoch=0) == [3, 2, 7, 0, 5, 6, 9, 4, 1, 8]
    assert permuted(123_456, 1_000_000, seed=7, epoch=2) == 296423


def test_every_place_is_equally_likely() -> None:
    size, num_epochs = 5, 4000
    counts = [[0] * size for _ in range(size)]
    for epoch in range(num_epochs):
        for index, place in enumerate(order(size, seed=1, epoch=epoch)):
            counts[index][place] += 1
    expected = num_epochs / size
    chi_squared = sum((count - expected) ** 2 / expected for row in counts for count in row)
    # 16 degrees of freedom; above 45 in 1 of 7,000 runs, and the seed is fixed
    assert chi_squared < 45.0


@pytest.mark.parametrize("index", [-1, 5])
def test_an_index_outside_the_range_is_refused(index: int) -> None:
    with pytest.raises(IndexError):
        permuted(index, 5, seed=0, epoch=0)
