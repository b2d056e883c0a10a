"""Claims about routes, against masks of numpy: each device gets what it needs and has not, and nothing twice."""

from __future__ import annotations

import random
from itertools import pairwise, product

import numpy as np
import pytest

from pipeline.plan.layouts.boxes import Box
from pipeline.plan.layouts.placed import Layout
from pipeline.plan.layouts.route import route
from pipeline.plan.layouts.vectors import vectors
from protocol.errors import ConfigError


def even(rng: random.Random, shape: tuple[int, ...], devices: list[int]) -> dict[int, list[Box]]:
    """A layout that divides the tensor."""
    vector = rng.choice([each for each in vectors(shape, len(devices)) if each[1] == 1])
    return {device: [box] for device, (box, _) in Layout(shape, vector, tuple(devices)).held().items()}


def uneven(rng: random.Random, shape: tuple[int, ...], devices: list[int]) -> dict[int, list[Box]]:
    """Parts with edges anywhere, dealt out at random; some devices have several, and some parts have several devices."""
    edges = [sorted({0, length, *(rng.randrange(length) for _ in range(2))}) for length in shape]
    parts: dict[int, list[Box]] = {device: [] for device in devices}
    for box in product(*(list(pairwise(row)) for row in edges)):
        for device in rng.sample(devices, min(len(devices), rng.choice([1, 1, 2]))):
            parts[device].append(box)
    return parts


def numbers(box: Box) -> tuple[slice, ...]:
    return tuple(slice(*side) for side in box)


@pytest.mark.parametrize("overlapping", [False, True])
@pytest.mark.parametrize("kind", [even, uneven])
def test_each_device_gets_each_element_that_it_needs_and_has_not_once(kind, overlapping: bool) -> None:
    rng, random_numbers = random.Random(0), np.random.default_rng(0)
    for _ in range(150):
        shape = rng.choice([(4, 8), (8, 4, 4), (8,)] if kind is even else [(7, 5), (3, 5, 4), (11,)])
        first, second = rng.choice([1, 2, 4]), rng.choice([1, 2, 4])
        pool = list(range(4 if overlapping else 8))
        devices = rng.sample(pool, min(first + second, len(pool)))
        learners = devices[:first]
        generators = rng.sample(pool, second) if overlapping else devices[first:]
        have, need = kind(rng, shape, learners), kind(rng, shape, generators)
        whole = random_numbers.normal(size=shape)
        there = {device: np.full(shape, np.nan) for device in pool}
        had = {device: np.zeros(shape, bool) for device in pool}
        wanted = {device: np.zeros(shape, bool) for device in pool}
        for device, boxes in have.items():
            for box in boxes:
                there[device][numbers(box)] = whole[numbers(box)]
                had[device][numbers(box)] = True
        for device, boxes in need.items():
            for box in boxes:
                wanted[device][numbers(box)] = True
        moved = 0
        start = {device: tensor.copy() for device, tensor in there.items()}
        for source, target, box in route(have, need):
            part = start[source][numbers(box)]
            assert np.isnan(there[target][numbers(box)]).all(), "it had none of it"
            there[target][numbers(box)] = part
            moved += part.size
        for device in pool:
            assert (there[device][wanted[device]] == whole[wanted[device]]).all()
        assert moved == sum(int((wanted[device] & ~had[device]).sum()) for device in pool), "the lower bound"


def test_copies_share_the_work_of_sending() -> None:
    have = {0: [((0, 8),)], 1: [((0, 8),)]}
    transfers = route(have, {2: [((0, 4),)], 3: [((4, 8),)], 4: [((0, 4),)], 5: [((4, 8),)]})
    assert sorted(each.source for each in transfers) == [0, 0, 1, 1]


def test_neighbours_that_go_the_same_way_go_as_one() -> None:
    have = {0: [((0, 4), (0, 2)), ((0, 4), (2, 4))], 1: [((4, 8), (0, 4))]}
    assert len(route(have, {2: [((0, 8), (0, 4))]})) <= 3
    assert len(route({0: [((0, 2),), ((2, 4),)]}, {1: [((0, 4),)]})) == 1


def test_a_part_that_nobody_has_is_named() -> None:
    with pytest.raises(ConfigError, match=r"device 1 needs \(\(2, 4\),\) of a tensor, and no device has it"):
        route({0: [((0, 2),)]}, {1: [((0, 4),)]})
