"""The least period and latency of a small placement, by trying all start times. It shares no code with the search:
overlap is looked up second by second on the circle, memory counted over many periods."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pipeline.schedule.blocks import Placement


def least_period(placement: Placement, memory: Sequence[int]) -> int | None:
    """Return the least period; None if no order keeps the memory."""
    periods = range(1, sum(block.span for block in placement.blocks) + 1)
    return next((period for period in periods if next(_valid(placement, period, memory), None)), None)


def least(placement: Placement, memory: Sequence[int]) -> tuple[int, int] | None:
    """Return the least period and the least latency with it; None if no order keeps the memory."""
    period = least_period(placement, memory)
    if period is None:
        return None
    spans = [block.span for block in placement.blocks]
    return period, min(
        max(start + span for start, span in zip(starts, spans, strict=True)) - min(starts)
        for starts in _valid(placement, period, memory)
    )


def _valid(placement: Placement, period: int, memory: Sequence[int]) -> Iterator[list[int]]:
    return (starts for starts in _starts(placement, period) if _keeps(placement, period, starts, memory))


def _starts(placement: Placement, period: int) -> Iterator[list[int]]:
    """Yield all start times with which every wait is kept and no device runs two blocks at once."""
    order, blocks = placement.order, placement.blocks
    starts: dict[int, int] = {}
    taken: dict[tuple[int, int], int] = {}

    def place(position: int) -> Iterator[list[int]]:
        if position == len(order):
            if all(starts[b] + period * d >= starts[a] + blocks[a].span for a, b, d in placement.edges):
                yield [starts[i] for i in range(len(blocks))]
            return
        i = order[position]
        ready = [starts[a] + blocks[a].span for a, b, d in placement.edges if b == i and not d]
        low = max(ready) if ready else (-period if position else 0)
        for start in range(low, low + (2 * period if position else 1)):
            cells = [
                (device, at % period) for device in blocks[i].devices for at in range(start, start + blocks[i].span)
            ]
            if blocks[i].span > period or any(cell in taken for cell in cells):
                continue
            starts[i] = start
            taken.update(dict.fromkeys(cells, i))
            yield from place(position + 1)
            for cell in cells:
                del taken[cell]

    yield from place(0)


def _keeps(placement: Placement, period: int, starts: list[int], memory: Sequence[int]) -> bool:
    """Whether the memory that is held stays within the limits at each start in a period in the middle of many."""
    blocks = placement.blocks
    most = max(starts) - min(starts) + max(block.span for block in blocks)
    num = 2 * (most // period + 2)
    begin = max(starts) + most + period
    for i, block in enumerate(blocks):
        if block.memory <= 0:
            continue
        at = starts[i] + -(-(begin - starts[i]) // period) * period
        for device in block.devices:
            held = 0
            for j, other in enumerate(blocks):
                if device in other.devices:
                    ends = 0 if other.memory > 0 else other.span
                    held += other.memory * sum(starts[j] + m * period + ends <= at for m in range(-num, 2 * num))
            if held > memory[device]:
                return False
    return True
