"""Layouts on named devices, and the collectives and sends that lead from one to another.

A path of vectors does not say which device has what afterwards. Copies and partial sums may be grouped in several ways,
so the groups are chosen such that each device ends with its own part. Where no choice does, the tensor is made whole on
all devices instead, and each keeps its part."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from pipeline.plan.layouts.boxes import Box
from pipeline.plan.layouts.vectors import (
    Change,
    D,
    Kind,
    Path,
    R,
    Shape,
    V,
    Vector,
    change,
    crossing,
    shortest,
    shortest_between,
)
from protocol.errors import ConfigError


class Primitive(NamedTuple):
    """One collective or send, as one group of devices does it."""

    kind: Kind
    sources: tuple[int, ...]
    """In the order of their parts."""
    targets: tuple[int, ...]
    axis: int
    """Of the tensor, along which it is joined or, of all others, cut. -1: none, as for sums and copies."""
    to_axis: int = -1
    """Of an all-to-all, along which it is cut."""


@dataclass(frozen=True)
class Layout:
    """A tensor on devices. ``devices`` are in the order of the vector's entries, the last one running fastest."""

    shape: Shape
    vector: Vector
    devices: tuple[int, ...]

    @property
    def grid(self) -> np.ndarray:
        """The devices, as an array with the vector as its shape."""
        return np.array(self.devices).reshape(self.vector)

    def held(self) -> dict[int, tuple[Box, int]]:
        """Return what each device has: a range of each axis, and which of the partial sums."""
        lengths = [length // parts for length, parts in zip(self.shape, self.vector[D:], strict=True)]
        return {
            int(device): (
                tuple((place * size, (place + 1) * size) for place, size in zip(places[D:], lengths, strict=True)),
                places[V],
            )
            for places, device in np.ndenumerate(self.grid)
        }


Steps = tuple[tuple[Primitive, ...], ...]
"""Steps in order; the groups of one act at once, each on what its devices had before."""


def steps_between(before: Layout, after: Layout) -> Steps:
    """Return what leads from a layout to another. Raises ConfigError if no path does.

    ``after`` has no partial sums. The last step may be a chunk along no axis, after which each device keeps its own part
    of the whole tensor."""
    if set(before.devices) == set(after.devices):
        return _within(before, after)
    return _between(before, after)


def _within(before: Layout, after: Layout) -> Steps:
    found = _aligned(before, after, shortest(before.shape, before.vector, after.vector).vectors)
    if found is not None:
        return found
    whole = (len(before.devices), 1, *(1 for _ in before.shape))
    everywhere = Layout(before.shape, whole, before.devices)
    to_whole = _aligned(before, everywhere, shortest(before.shape, before.vector, whole).vectors)
    if to_whole is None or after.vector[V] > 1:
        raise ConfigError(f"no order of the devices leads from {before} to {after}")
    return (*to_whole, (Primitive(Kind.CHUNK, after.devices, after.devices, -1),))


def _between(before: Layout, after: Layout) -> Steps:
    first, second = shortest_between(before.shape, before.vector, after.vector)
    sent, to_sent = next(_ways(before, first.vectors))
    for received in _reversed_ways(after, second):
        to_after = _aligned(received, after, second.vectors)
        if to_after is not None:
            return (*to_sent, tuple(_across(sent, received)), *to_after)
    raise ConfigError(f"no order of the devices leads from {before} to {after}")


def _aligned(before: Layout, after: Layout, vectors: Sequence[Vector]) -> Steps | None:
    """Return the primitives along a path such that each device ends with what it has in ``after``."""
    wanted = after.held()
    return next((steps for layout, steps in _ways(before, vectors) if layout.held() == wanted), None)


def _ways(before: Layout, vectors: Sequence[Vector]) -> Iterator[tuple[Layout, Steps]]:
    """Go along a path in every way; yield the layouts where it ends, each with its primitives."""
    if len(vectors) < 2:
        yield before, ()
        return
    step = change(before.vector, vectors[1])
    assert step is not None, "a path is made of steps"
    for layout, done in _hops(before, vectors[1], step):
        for end, rest in _ways(layout, vectors[1:]):
            yield end, (done, *rest)


def _reversed_ways(after: Layout, path: Path) -> Iterator[Layout]:
    """Yield layouts from which the path may lead to ``after``: where the path from there to its start ends."""
    vectors = path.vectors[::-1]
    if all(change(a, b) for a, b in pairwise(vectors)):
        for layout, _ in _ways(after, vectors):
            yield layout


def _hops(before: Layout, vector: Vector, step: Change) -> Iterator[tuple[Layout, tuple[Primitive, ...]]]:
    """Make one step with each grouping of copies or partial sums."""
    size, kind = before.vector[step.given], step.kind
    axis = (step.given if kind in (Kind.ALL_GATHER, Kind.ALL_TO_ALL) else step.taken) - D
    to_axis = step.taken - D if kind is Kind.ALL_TO_ALL else -1
    for chunks in [1, *(k for k in range(2, size) if step.given in (R, V) and size % k == 0)]:
        grid = _transposed(before.grid, step.given, chunks)
        groups = _last(grid, step.given, step.parts)
        made = np.empty(vector, int)
        _last(made, step.taken, step.parts)[...] = groups
        rows = [tuple(map(int, row)) for row in groups.reshape(-1, step.parts)]
        done = tuple(Primitive(kind, row, row, max(axis, -1), to_axis) for row in rows)
        yield Layout(before.shape, vector, tuple(map(int, made.flatten()))), done


def _across(before: Layout, after: Layout) -> Iterator[Primitive]:
    """Yield the one step between two sets of devices."""
    step = crossing(before.vector, after.vector)
    assert step is not None, "a path is made of steps"
    entry, axis = step.given, max(step.given - D, -1)
    sources = np.moveaxis(before.grid, entry, -1)
    targets = np.moveaxis(after.grid, entry, -1)
    if after.vector[entry] >= before.vector[entry]:
        rows = zip(sources.reshape(-1, 1), targets.reshape(-1, step.parts), strict=True)
    else:
        rows = zip(sources.reshape(-1, step.parts), targets.reshape(-1, 1), strict=True)
    for row, others in rows:
        given, taken = tuple(map(int, row)), tuple(map(int, others))
        if step.kind is Kind.MOVE:
            # of several copies the one that is there already
            given = taken if taken[0] in given else given[:1]
        yield Primitive(step.kind, given, taken, axis)


def _transposed(grid: np.ndarray, entry: int, chunks: int) -> np.ndarray:
    """Return the devices with an entry's places dealt out in another order, as columns of rows of ``chunks``."""
    if chunks == 1:
        return grid
    rows = grid.reshape(*grid.shape[:entry], -1, chunks, *grid.shape[entry + 1 :])
    return np.swapaxes(rows, entry, entry + 1).reshape(grid.shape)


def _last(grid: np.ndarray, entry: int, parts: int) -> np.ndarray:
    """Return a view in which the inner ``parts`` of an entry are an axis of their own, the last one."""
    split = grid.reshape(*grid.shape[:entry], -1, parts, *grid.shape[entry + 1 :])
    return np.moveaxis(split, entry + 1, -1)
