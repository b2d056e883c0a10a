"""Claims about who fetches from whom."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.weights.relay import MAX_WIDTH, ancestors, width

WIDTHS = st.integers(1, MAX_WIDTH)


@given(st.integers(0, 3000), WIDTHS)
def test_a_host_fetches_from_hosts_that_came_before_it_its_parent_first(position: int, width: int) -> None:
    above = ancestors(position, width)
    assert above == sorted(above, reverse=True)
    assert all(0 <= place < position for place in above)
    if above:
        assert ancestors(above[0], width) == above[1:], "a parent's own sources are the next ones"


@given(st.integers(1, 500), WIDTHS)
def test_no_source_serves_more_hosts_than_the_trees_width(num_relays: int, width: int) -> None:
    parents = [next(iter(ancestors(position, width)), -1) for position in range(num_relays)]
    assert max(parents.count(parent) for parent in set(parents)) <= width


@given(st.lists(st.tuples(st.integers(0, 200), WIDTHS), min_size=1, max_size=50))
def test_hosts_that_see_different_numbers_of_relays_never_wait_in_a_circle(views: list[tuple[int, int]]) -> None:
    # each position as its own host sees the tree; a walk to the learner always goes down in order
    seen = dict(views)
    for position in seen:
        place, steps = position, 0
        while (above := ancestors(place, seen.get(place, 1))) and steps <= len(seen) + 200:
            assert above[0] < place
            place, steps = above[0], steps + 1
        assert not ancestors(place, seen.get(place, 1))


@pytest.mark.parametrize("num_relays", [1, 4, 50])
def test_a_long_version_goes_down_a_chain_so_that_every_link_carries_one_copy(num_relays: int) -> None:
    assert width(1000, num_relays, is_passed_on_whole=False) == 1


def test_a_short_version_for_many_hosts_goes_down_a_wide_tree() -> None:
    assert width(1, 1000, is_passed_on_whole=False) > 2


def test_deltas_which_each_level_passes_on_whole_have_a_tree_of_few_levels() -> None:
    chosen = width(50, 100, is_passed_on_whole=True)
    assert 1 < chosen <= MAX_WIDTH
    assert len(ancestors(99, chosen)) + 1 <= 7
    assert width(50, 1, is_passed_on_whole=True) == 1
