"""Layers are cut into stages as well as any cut of them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.schedule.layers import cut_layers


def all_cuts(num_layers: int, num_stages: int) -> list[list[range]]:
    inner = combinations(range(1, num_layers), num_stages - 1)
    return [[range(*pair) for pair in pairwise((0, *bounds, num_layers))] for bounds in inner]


def sums(costs: Sequence[int], cut: Sequence[range]) -> list[int]:
    return [sum(costs[layer] for layer in layers) for layers in cut]


def quality(costs: Sequence[int], cut: Sequence[range]) -> tuple[int, int]:
    found = sums(costs, cut)
    return max(found), sum(each * each for each in found)


@given(st.lists(st.integers(1, 12), min_size=1, max_size=9), st.data())
def test_no_cut_has_a_cheaper_dearest_stage_and_none_of_those_is_more_even(
    costs: list[int], data: st.DataObject
) -> None:
    num_stages = data.draw(st.integers(1, len(costs)))
    found = cut_layers(costs, num_stages)
    assert found in all_cuts(len(costs), num_stages), "consecutive layers, at least one a stage"
    assert quality(costs, found) == min(quality(costs, cut) for cut in all_cuts(len(costs), num_stages))


def test_equal_layers_are_shared_evenly_with_fewest_in_front() -> None:
    assert [len(layers) for layers in cut_layers([5] * 11, 4)] == [2, 3, 3, 3]


def test_a_head_as_dear_as_five_layers_takes_their_place() -> None:
    # Qwen2.5-1.5B: 46.8 M weights a layer, 233.4 M in the head
    costs = [46_797_824] * 27 + [46_797_824 + 233_373_696]
    found = cut_layers(costs, 4)
    assert [len(layers) for layers in found] == [8, 8, 8, 4]
    even = [range(start, start + 7) for start in range(0, 28, 7)]
    assert max(sums(costs, even)) / max(sums(costs, found)) > 1.32


def test_more_stages_than_layers_are_an_error() -> None:
    with pytest.raises(ValueError, match="2 layers cannot be 3 stages"):
        cut_layers([1, 1], 3)
