"""Parts of tensors as index masks: a half-open range of each axis."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise, product

Box = tuple[tuple[int, int], ...]
"""(first, end) of each axis. Of a scalar: ()."""


def whole(shape: Sequence[int]) -> Box:
    return tuple((0, length) for length in shape)


def lengths(box: Box) -> tuple[int, ...]:
    return tuple(end - first for first, end in box)


def size(box: Box) -> int:
    return math.prod(lengths(box))


def overlap(one: Box, other: Box) -> Box | None:
    """Return what two boxes share, None if nothing."""
    shared = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return shared if all(first < end for first, end in shared) else None


def contains(outer: Box, inner: Box) -> bool:
    return all(a <= c and d <= b for (a, b), (c, d) in zip(outer, inner, strict=True))


def within(box: Box, origin: Sequence[int]) -> Box:
    """Return a box as counted from ``origin``."""
    return tuple((first - zero, end - zero) for (first, end), zero in zip(box, origin, strict=True))


def starts(box: Box) -> tuple[int, ...]:
    return tuple(first for first, _ in box)


def hull(boxes: Iterable[Box]) -> Box:
    """Return the smallest box around some."""
    return tuple((min(first for first, _ in axis), max(end for _, end in axis)) for axis in zip(*boxes, strict=True))


def cells(box: Box, others: Iterable[Box]) -> list[list[tuple[int, int]]]:
    """Return the ranges of each axis into which the edges of other boxes cut one."""
    cut = [set(side) for side in box]
    for other in others:
        for axis, (first, end) in enumerate(other):
            cut[axis] |= {edge for edge in (first, end) if box[axis][0] < edge < box[axis][1]}
    sorted_cuts = [sorted(edges) for edges in cut]
    return [list(pairwise(edges)) for edges in sorted_cuts]


def pieces(box: Box, others: Iterable[Box]) -> list[Box]:
    """Return the parts into which the edges of other boxes cut one: each is inside another box or apart from it."""
    return list(product(*cells(box, others)))
