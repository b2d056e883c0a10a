"""What no schedule can beat: three lower bounds on the period, from the work of a device, from circles of dependencies
and from memory that is held for a while."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.schedule.blocks import Placement
from protocol.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Bounds:
    """Least periods."""

    work: int
    """The busiest device's work (ResMII)."""
    recurrence: int
    """The longest circle of dependencies, over the micro-batches that it spans (RecMII)."""
    memory: int
    """Memory times the time that it is held at least, over the limit (MemMII)."""

    @property
    def least(self) -> int:
        return max(self.work, self.recurrence, self.memory)


def period_bounds(placement: Placement, memory: Sequence[int]) -> Bounds:
    """Return the bounds for limits of the memory by device. Raises ConfigError for memory that is never given back."""
    work = max(map(placement.work, range(placement.num_devices)))
    held = [
        sum(amount * span for amount, span in lifetimes(placement, device)) for device in range(placement.num_devices)
    ]
    limited = max(-(-total // limit) if limit else total for total, limit in zip(held, memory, strict=True))
    return Bounds(work, _recurrence(placement), limited)


def least_delays(placement: Placement) -> list[list[int | None]]:
    """Return, for each pair of blocks, how long after the first one's start the second one's start is at least, within a
    micro-batch; None if it does not wait for it."""
    waits: list[list[int]] = [[] for _ in placement.blocks]
    for before, after, distance in placement.edges:
        if not distance:
            waits[after].append(before)
    rows: list[list[int | None]] = []
    for source in range(len(placement.blocks)):
        row: list[int | None] = [None] * len(placement.blocks)
        row[source] = 0
        for place in placement.order:
            spans = [start + placement.blocks[b].span for b in waits[place] if (start := row[b]) is not None]
            if spans and place != source:
                row[place] = max(spans)
        rows.append(row)
    return rows


def critical_path(placement: Placement) -> int:
    """Return the least latency of a micro-batch that has all devices to itself."""
    spans = [block.span for block in placement.blocks]
    rows = least_delays(placement)
    return max(delay + spans[place] for row in rows for place, delay in enumerate(row) if delay is not None)


def lifetimes(placement: Placement, device: int) -> list[tuple[int, int]]:
    """Return amounts of memory that a micro-batch takes on a device, each with the least time that it is held.

    Pairs what blocks take with what later blocks give back, by augmenting paths. Raises ConfigError if a block gives back
    what none has surely taken before, or if something is kept forever."""
    after, blocks = least_delays(placement), placement.blocks
    places = placement.on_device[device]
    taken = {place: blocks[place].memory for place in places if blocks[place].memory > 0}
    given = {place: -blocks[place].memory for place in places if blocks[place].memory < 0}
    if sum(taken.values()) > sum(given.values()):
        rest = sum(taken.values()) - sum(given.values())
        raise ConfigError(f"{placement.name}: device {device} holds {rest} more after each micro-batch; give it back")
    flow = {(a, b): 0 for a in taken for b in given if after[a][b] is not None}
    for release in given:
        need = given[release]
        while need:
            path = _augmenting(release, taken, flow)
            if path is None:
                name = blocks[release].name
                raise ConfigError(
                    f"{placement.name}: block {name!r} gives back {need} on device {device} that no block before it has "
                    "taken; let it wait for the block that takes it, or give back less"
                )
            amount = min([need, taken[path[-1][0]], *(flow[edge] for edge in path[1::2])])
            for number, edge in enumerate(path):
                flow[edge] += -amount if number % 2 else amount
            taken[path[-1][0]] -= amount
            need -= amount
    return [(amount, (after[a][b] or 0) + blocks[b].span) for (a, b), amount in flow.items() if amount]


def _augmenting(release: int, taken: dict[int, int], flow: dict[tuple[int, int], int]) -> list[tuple[int, int]] | None:
    """Return pairs from ``release`` to a block with memory left: to add to, to take from, to add to, and so on."""
    paths: list[tuple[int, list[tuple[int, int]]]] = [(release, [])]
    seen = {release}
    while paths:
        place, path = paths.pop(0)
        for a, b in flow:
            if b != place or (path and (a, b) == path[-1]):
                continue
            extended = [*path, (a, b)]
            if taken[a]:
                return extended
            for a2, b2 in flow:
                if a2 == a and b2 not in seen and flow[a2, b2]:
                    seen.add(b2)
                    paths.append((b2, [*extended, (a2, b2)]))
    return None


def _recurrence(placement: Placement) -> int:
    """Return the least period that no circle of dependencies forbids."""
    low, high = 0, sum(block.span for block in placement.blocks)
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if _has_growing_circle(placement, middle) else (low, middle)
    return low


def _has_growing_circle(placement: Placement, period: int) -> bool:
    starts = [0] * len(placement.blocks)
    for _ in placement.blocks:
        changed = False
        for before, after, distance in placement.edges:
            least = starts[before] + placement.blocks[before].span - period * distance
            if starts[after] < least:
                starts[after], changed = least, True
        if not changed:
            return False
    return True
