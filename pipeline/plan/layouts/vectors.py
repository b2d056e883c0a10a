"""Layouts as vectors <R, V, D1, ..., Dk>, what changes one into another, and the shortest path of such changes.

A change makes one entry smaller and another one larger by the same factor, on one set of devices; between two sets of
devices one entry changes, or none. Its cost is the number of elements that one group of devices moves, plus 1: so of
two equal ways the one with fewer steps wins."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import StrEnum
from functools import lru_cache
from typing import Final, NamedTuple

from protocol.errors import ConfigError

Vector = tuple[int, ...]
"""(R, V, D1, ..., Dk)."""
Shape = tuple[int, ...]
R: Final = 0
V: Final = 1
D: Final = 2
"""Place of the first axis of the tensor in a vector."""
CROSSING: Final = 24
"""By how much an element between two sets of devices costs more than one within a set: 300 GB/s to 100 Gbit/s."""


class Kind(StrEnum):
    """What devices do together to change a layout. Below the line: between two sets of devices."""

    ALL_GATHER = "all-gather"
    ALL_TO_ALL = "all-to-all"
    ALL_REDUCE = "all-reduce"
    REDUCE_SCATTER = "reduce-scatter"
    CHUNK = "chunk"
    """Each of the copies keeps its own part. Nothing moves."""
    VALUE_CHUNK = "value-chunk"
    """Each of n copies keeps a sum's n-th part. Nothing moves."""
    # ----
    MOVE = "move"
    BROADCAST = "broadcast"
    SCATTER = "scatter"
    GATHER = "gather"
    VALUE_SCATTER = "value-scatter"
    VALUE_GATHER = "value-gather"


_CHANGES: Final = {
    (D, R): Kind.ALL_GATHER,
    (D, D): Kind.ALL_TO_ALL,
    (V, R): Kind.ALL_REDUCE,
    (V, D): Kind.REDUCE_SCATTER,
    (R, D): Kind.CHUNK,
    (R, V): Kind.VALUE_CHUNK,
}
"""By what becomes smaller and what becomes larger."""
_VOLUMES: Final[Mapping[Kind, Callable[[int, int], int]]] = {
    Kind.ALL_GATHER: lambda x, n: (n - 1) * x,
    Kind.ALL_TO_ALL: lambda x, n: (n - 1) * x // n,
    Kind.ALL_REDUCE: lambda x, n: 2 * (n - 1) * x // n,
    Kind.REDUCE_SCATTER: lambda x, n: (n - 1) * x // n,
    Kind.CHUNK: lambda x, n: 0,
    Kind.VALUE_CHUNK: lambda x, n: 0,
    Kind.MOVE: lambda x, n: x,
    Kind.BROADCAST: lambda x, n: n * x,
    Kind.SCATTER: lambda x, n: x,
    Kind.GATHER: lambda x, n: n * x,
    Kind.VALUE_SCATTER: lambda x, n: n * x,
    Kind.VALUE_GATHER: lambda x, n: n * x,
}
"""Elements moved by one group of n devices, each of which begins with x."""


class Change(NamedTuple):
    """One step from a layout to another."""

    kind: Kind
    given: int
    """Entry of the vector that becomes smaller; between sets of devices the one that changes."""
    taken: int
    """Entry that becomes larger; between sets of devices the same as ``given``."""
    parts: int
    """By which factor."""


class Path(NamedTuple):
    vectors: tuple[Vector, ...]
    """From the first layout to the last one, both included."""
    cost: int


def vectors(shape: Shape, devices: int) -> list[Vector]:
    """Return all layouts of a tensor on so many devices, each axis cut into equal parts."""

    def factors(number: int, entries: int) -> Iterator[Vector]:
        if entries == 1:
            yield (number,)
            return
        for first in range(1, number + 1):
            if number % first == 0:
                for rest in factors(number // first, entries - 1):
                    yield first, *rest

    return [each for each in factors(devices, D + len(shape)) if _divides(shape, each)]


def change(before: Vector, after: Vector) -> Change | None:
    """Return the one step from a layout to another on the same devices, None if there is no such step."""
    smaller = [place for place, (a, b) in enumerate(zip(before, after, strict=True)) if a > b]
    larger = [place for place, (a, b) in enumerate(zip(before, after, strict=True)) if a < b]
    if len(smaller) != 1 or len(larger) != 1:
        return None
    (given,), (taken,) = smaller, larger
    kind = _CHANGES.get((min(given, D), min(taken, D)))
    if kind is None or before[given] % after[given]:
        return None
    return Change(kind, given, taken, before[given] // after[given])


def crossing(before: Vector, after: Vector) -> Change | None:
    """Return the one step from a layout on some devices to one on others, None if there is no such step."""
    places = [place for place, (a, b) in enumerate(zip(before, after, strict=True)) if a != b]
    if len(places) > 1:
        return None
    if not places:
        return Change(Kind.MOVE, R, R, 1)
    (place,) = places
    more, less = max(before[place], after[place]), min(before[place], after[place])
    if more % less:
        return None
    kinds = {R: (Kind.BROADCAST, Kind.MOVE), V: (Kind.VALUE_SCATTER, Kind.VALUE_GATHER)}
    up, down = kinds.get(place, (Kind.SCATTER, Kind.GATHER))
    return Change(up if after[place] > before[place] else down, place, place, more // less)


def volume(shape: Shape, before: Vector, step: Change) -> int:
    """Return the elements that one group of devices moves in a step."""
    return _VOLUMES[step.kind](math.prod(shape) // math.prod(before[D:]), step.parts)


def shortest(shape: Shape, before: Vector, after: Vector) -> Path:
    """Return the cheapest path between two layouts on the same devices. Raises ConfigError if there is none."""
    _check(shape, before, after)
    if math.prod(before) != math.prod(after):
        raise ConfigError(
            f"layout {before} is on {math.prod(before)} devices and {after} on {math.prod(after)}; expected equal numbers"
        )
    return _reached(_within(shape, math.prod(before)), before, after)


def shortest_between(shape: Shape, before: Vector, after: Vector) -> tuple[Path, Path]:
    """Return the cheapest path from a layout on some devices to one on others, as its two halves. Raises ConfigError.

    The second half begins after the step between the devices; its cost is that of the whole."""
    _check(shape, before, after)
    path = _reached(_between(shape, math.prod(before), math.prod(after)), (0, *before), (1, *after))
    halves = [tuple(each[1:] for each in path.vectors if each[0] == side) for side in (0, 1)]
    return Path(halves[0], 0), Path(halves[1], path.cost)


_Edges = Mapping[Vector, Mapping[Vector, int]]


@lru_cache(maxsize=256)
def _within(shape: Shape, devices: int) -> _Edges:
    """Return the cost of each step, by layout."""
    nodes = vectors(shape, devices)
    return {a: {b: volume(shape, a, step) + 1 for b in nodes if (step := change(a, b))} for a in nodes}


@lru_cache(maxsize=256)
def _between(shape: Shape, devices: int, others: int) -> _Edges:
    """Return the cost of each step, by layout with 0 before it for the first set of devices and 1 for the second."""
    first, second = _within(shape, devices), _within(shape, others)
    edges = {(0, *a): {(0, *b): cost for b, cost in row.items()} for a, row in first.items()}
    for a in first:
        edges[0, *a] |= {(1, *b): CROSSING * (volume(shape, a, step) + 1) for b in second if (step := crossing(a, b))}
    return edges | {(1, *a): {(1, *b): cost for b, cost in row.items()} for a, row in second.items()}


def _reached(edges: _Edges, start: Vector, end: Vector) -> Path:
    """Dijkstra; of equal paths the one through layouts that come first."""
    numbers = {node: number for number, node in enumerate(edges)}
    costs, before, done = {start: 0}, dict[Vector, Vector](), set[Vector]()
    waiting = [(0, numbers[start], start)]
    while waiting:
        cost, _, node = heapq.heappop(waiting)
        if node in done:
            continue
        done.add(node)
        for after, more in edges[node].items():
            if cost + more < costs.get(after, cost + more + 1):
                costs[after], before[after] = cost + more, node
                heapq.heappush(waiting, (cost + more, numbers[after], after))
    if end not in costs:
        raise ConfigError(
            f"no path of collectives leads from layout {start} to {end}; expected fewer partial sums at the end"
        )
    path = [end]
    while path[-1] != start:
        path.append(before[path[-1]])
    return Path(tuple(reversed(path)), costs[end])


def _divides(shape: Shape, vector: Vector) -> bool:
    return all(length % parts == 0 for length, parts in zip(shape, vector[D:], strict=True))


def _check(shape: Shape, *layouts: Sequence[int]) -> None:
    for each in layouts:
        if len(each) != D + len(shape) or min(each) < 1 or not _divides(shape, tuple(each)):
            raise ConfigError(
                f"layout {tuple(each)} of a tensor {list(shape)}; expected copies, partial sums, and for each axis a number of "
                "parts that divides its length"
            )
