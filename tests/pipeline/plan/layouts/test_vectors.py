"""Claims about layouts as vectors: the checksums are those of nnScaler's own graph of layouts."""

from __future__ import annotations

from collections import Counter
from itertools import permutations

import pytest

from pipeline.plan.layouts.vectors import change, shortest, shortest_between, vectors
from protocol.errors import ConfigError


@pytest.mark.parametrize(
    ("devices", "states", "steps", "total", "hops"),
    [(2, 4, 10, 294_926, {1: 10, 2: 2}), (4, 10, 50, 2_236_550, {1: 50, 2: 36, 3: 4})],
)
def test_the_graph_of_layouts_has_the_states_steps_and_shortest_costs_of_nnscaler(
    devices: int, states: int, steps: int, total: int, hops: dict[int, int]
) -> None:
    shape = (256, 256)
    layouts = vectors(shape, devices)
    assert len(layouts) == states
    pairs = list(permutations(layouts, 2))
    assert sum(change(a, b) is not None for a, b in pairs) == steps
    paths = [shortest(shape, a, b) for a, b in pairs]
    assert sum(path.cost for path in paths) == total
    assert Counter(len(path.vectors) - 1 for path in paths) == hops


def test_a_sum_over_four_devices_is_scattered_in_part_and_reduced_in_part() -> None:
    path = shortest((128, 256, 512), (1, 4, 1, 1, 2), (2, 1, 2, 1, 2))
    assert path.vectors == ((1, 4, 1, 1, 2), (1, 2, 2, 1, 2), (2, 1, 2, 1, 2))


def test_between_devices_a_tensor_moves_in_its_smallest_parts() -> None:
    first, second = shortest_between((128, 256, 512), (1, 4, 1, 1, 2), (2, 1, 2, 1, 2))
    assert first.vectors == ((1, 4, 1, 1, 2), (1, 1, 4, 1, 2))
    assert second.vectors == ((1, 1, 4, 1, 2), (2, 1, 2, 1, 2))


def test_a_layout_that_does_not_divide_the_tensor_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"layout \(1, 1, 3\) of a tensor \[4\]; expected copies, partial sums"):
        shortest((4,), (1, 1, 3), (3, 1, 1))
    with pytest.raises(ConfigError, match=r"is on 2 devices and .* on 4"):
        shortest((4,), (1, 1, 2), (1, 1, 4))
