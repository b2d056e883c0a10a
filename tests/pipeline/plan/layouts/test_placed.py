"""Claims about layouts on devices. What primitives do is played with arrays here, apart from what chose them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import chain

import numpy as np
import pytest

from pipeline.plan.layouts.placed import Layout, Primitive, Steps, steps_between
from pipeline.plan.layouts.vectors import Kind, vectors
from protocol.errors import ConfigError


def play(held: dict[int, np.ndarray], steps: Steps) -> None:
    """Carry out steps on what each device has."""
    had = dict[int, np.ndarray]()
    for number, (kind, sources, targets, axis, to_axis) in enumerate_groups(steps):
        had = dict(held) if number == 0 else had
        given, n = [had[device] for device in sources], len(targets)
        match kind:
            case Kind.ALL_GATHER | Kind.GATHER:
                made = [np.concatenate(given, axis)] * n
            case Kind.ALL_REDUCE | Kind.VALUE_GATHER:
                made = [np.sum(given, 0)] * n
            case Kind.REDUCE_SCATTER:
                made = np.split(np.sum(given, 0), n, axis)
            case Kind.ALL_TO_ALL:
                rows = [np.split(each, n, to_axis) for each in given]
                made = [np.concatenate(column, axis) for column in zip(*rows, strict=True)]
            case Kind.CHUNK if axis < 0:
                continue
            case Kind.CHUNK:
                made = [np.split(each, n, axis)[place] for place, each in enumerate(given)]
            case Kind.SCATTER:
                made = np.split(given[0], n, axis)
            case Kind.MOVE | Kind.BROADCAST:
                made = given * n if len(given) == 1 else given
            case Kind.VALUE_CHUNK | Kind.VALUE_SCATTER:
                made = [(given * n)[place] / n for place in range(n)]
        held |= dict(zip(targets, made, strict=True))


def enumerate_groups(steps: Steps) -> Iterator[tuple[int, Primitive]]:
    for groups in steps:
        yield from enumerate(groups)


def dealt(layout: Layout, tensor: np.ndarray, rng: np.random.Generator) -> dict[int, np.ndarray]:
    """Give each device its part. The partial sums are random numbers that add up to the tensor."""
    sums = rng.normal(size=(layout.vector[1], *tensor.shape))
    sums[-1] = tensor - sums[:-1].sum(0)
    return {device: sums[part][tuple(slice(*side) for side in box)] for device, (box, part) in layout.held().items()}


@pytest.mark.parametrize("apart", [False, True])
def test_primitives_lead_from_any_layout_to_any_other_on_devices_in_any_order(apart: bool) -> None:
    rng, numpy_rng = random.Random(0), np.random.default_rng(0)
    kinds = set[Kind]()
    refused = 0
    for _ in range(400):
        shape = rng.choice([(4, 8, 8), (3, 5)])
        tensor = numpy_rng.normal(size=shape)
        one, other = rng.choice([(2, 2), (4, 4), (8, 8), (4, 4)] if not apart else [(2, 4), (4, 2), (4, 4), (1, 4)])
        devices = list(range(one)) if not apart else list(range(12))
        before = Layout(shape, rng.choice(vectors(shape, one)), tuple(rng.sample(devices, one)))
        after = Layout(
            shape, rng.choice([v for v in vectors(shape, other) if v[1] == 1]), tuple(rng.sample(devices, other))
        )
        try:
            steps = steps_between(before, after)
        except ConfigError:
            refused += 1
            continue
        held = dealt(before, tensor, numpy_rng)
        play(held, steps)
        for device, (box, _) in after.held().items():
            got, wanted = held[device], tensor[tuple(slice(*side) for side in box)]
            if steps and steps[-1][0].axis < 0 and steps[-1][0].kind is Kind.CHUNK:
                got = got[tuple(slice(*side) for side in box)]
            np.testing.assert_allclose(got, wanted, atol=1e-12, err_msg=f"{before} to {after}: {steps}")
        kinds |= {group.kind for groups in steps for group in groups}
    within = {Kind.ALL_GATHER, Kind.ALL_TO_ALL, Kind.ALL_REDUCE, Kind.REDUCE_SCATTER, Kind.CHUNK}
    assert kinds >= ({Kind.MOVE, Kind.BROADCAST, Kind.SCATTER, Kind.GATHER} if apart else within)
    assert refused <= 8


def test_a_tensor_goes_to_other_devices_in_fourteen_steps_between() -> None:
    shape = (128, 256, 512)
    before = Layout(shape, (1, 4, 1, 1, 2), tuple(range(8)))
    after = Layout(shape, (2, 1, 2, 1, 2), tuple(range(8, 16)))
    steps = list(chain(*steps_between(before, after)))
    assert [step.kind for step in steps] == 2 * [Kind.REDUCE_SCATTER] + 8 * [Kind.MOVE] + 4 * [Kind.ALL_GATHER]
    assert [step.sources for step in steps[:2]] == [(0, 2, 4, 6), (1, 3, 5, 7)]
    assert {step.sources[0] for step in steps[2:10]} == set(range(8))
    assert {step.targets[0] for step in steps[2:10]} == set(range(8, 16))
    assert [step.sources for step in steps[10:]] == [(8, 12), (9, 13), (10, 14), (11, 15)]


def test_groups_are_chosen_such_that_each_device_ends_with_its_own_part() -> None:
    shape = (128, 256, 512)
    devices = tuple(range(8))
    before, after = Layout(shape, (1, 4, 1, 1, 2), devices), Layout(shape, (2, 1, 2, 1, 2), devices)
    steps = list(chain(*steps_between(before, after)))
    assert [step.kind for step in steps] == 4 * [Kind.REDUCE_SCATTER] + 4 * [Kind.ALL_REDUCE]
    assert [step.sources for step in steps] == [(0, 2), (1, 3), (4, 6), (5, 7), (0, 4), (1, 5), (2, 6), (3, 7)]
