"""Which part of a tensor goes from whom to whom, when some devices have its parts and others need theirs, as weights go
from a learner's ranks to generators.

Index masks are intersected, so parts may be uneven and the two sets of devices may overlap. Every device gets each
element that it needs and does not have, once, from one that has it: the fewest bytes there can be."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from pipeline.plan.layouts.boxes import Box, contains, hull, overlap, pieces, size
from protocol.errors import ConfigError

Parts = Mapping[int, Sequence[Box]]
"""Parts of one tensor, by device."""


class Transfer(NamedTuple):
    source: int
    target: int
    box: Box


def route(have: Parts, need: Parts) -> tuple[Transfer, ...]:
    """Return who sends which part to whom. Of several who have a part, the one that sends least so far.

    Raises ConfigError if nobody has some part that is needed."""
    held = [(device, box) for device, boxes in have.items() for box in boxes]
    sent, transfers = Counter[int](), list[Transfer]()
    for target, boxes in need.items():
        there = list(have.get(target, ()))
        for box in boxes:
            cells = list[Transfer]()
            for cell in pieces(box, [other for other in (*(part for _, part in held), *there) if overlap(other, box)]):
                if any(contains(own, cell) for own in there):
                    continue
                sources = [device for device, part in held if contains(part, cell)]
                if not sources:
                    raise ConfigError(f"device {target} needs {cell} of a tensor, and no device has it")
                # one that sends the part beside it already, so that they go as one
                beside = [each.source for each in cells[-1:] if each.source in sources]
                source = (beside or [min(sources, key=lambda device: (sent[device], device))])[0]
                sent[source] += size(cell)
                cells.append(Transfer(source, target, cell))
            transfers += _merged(cells)
            there.append(box)
    return tuple(transfers)


def _merged(cells: Iterable[Transfer]) -> list[Transfer]:
    """Put neighbours together that go the same way and fill a box."""
    made = list[Transfer]()
    for cell in cells:
        last = cell
        while made:
            both = hull([made[-1].box, last.box])
            if made[-1].source != last.source or size(both) != size(made[-1].box) + size(last.box):
                break
            last = Transfer(last.source, last.target, both)
            made.pop()
        made.append(last)
    return made
