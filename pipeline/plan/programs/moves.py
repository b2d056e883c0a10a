"""How the parts of a tensor that some devices have become the parts that others need.

Where both are layouts (``pipeline.plan.layouts``) the cheapest path of collectives and sends is taken, else each needed
part is cut out of what there is, sent, and put together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from pipeline.plan.layouts.boxes import (
    Box,
    contains,
    hull,
    lengths,
    overlap,
    pieces,
    starts,
    whole,
    within,
)
from pipeline.plan.layouts.placed import Layout, Steps, steps_between
from pipeline.plan.layouts.vectors import Kind, Shape
from pipeline.plan.programs.actions import Action, Add, Collective, Cut, Divide, Join, Receive, Send
from protocol.errors import ConfigError

Need = tuple[int, Box]
"""A device, and the part of the tensor that it needs, with nothing missing from its sum."""


@dataclass(frozen=True)
class Piece:
    """A part of a tensor that a device has."""

    device: int
    value: str
    box: Box
    terms: frozenset[object]
    """Which terms of the tensor's sum are in it. Pieces with the same terms are copies."""


@dataclass
class Move:
    """What devices do, in two parts: those that have something at once, those that need it when they need it."""

    values: dict[Need, str] = field(default_factory=dict[Need, str])
    gives: list[tuple[int, Action]] = field(default_factory=list[tuple[int, Action]])
    takes: list[tuple[int, Action]] = field(default_factory=list[tuple[int, Action]])


class Mover:
    """Makes the moves of one program; names and tags are not used twice."""

    def __init__(self) -> None:
        self._number = 0

    def new(self, name: str) -> str:
        """Return a name of a value that no other has."""
        self._number += 1
        return f"{name}#{self._number}"

    def move(self, name: str, shape: Shape, have: Iterable[Piece], needs: Iterable[Need]) -> Move:
        """Return what gives each need its part. The terms of ``have`` together are the whole sum."""
        move, wanted, single = Move(), list(dict.fromkeys(needs)), list(have)
        have = self._fused(name, single, move)
        terms = frozenset[object]().union(*(piece.terms for piece in have))
        if not self._local(name, have, wanted, terms, move) and not self._regular(
            name, shape, have, wanted, terms, move
        ):
            for need in wanted:
                # also of single pieces: copies may be added to different terms
                self._irregular(name, [*have, *single], need, terms, move)
        return move

    def _fused(self, name: str, have: Iterable[Piece], move: Move) -> list[Piece]:
        """Put together what one device has: neighbours are joined, terms of one part are added."""
        made = list[Piece]()
        for piece in have:
            waiting = [piece]
            while waiting:
                new = waiting.pop()
                for old in made:
                    both = self._pair(name, old, new, move) if old.device == new.device else None
                    if both is not None:
                        made.remove(old)
                        waiting.append(both)
                        break
                else:
                    made.append(new)
        return made

    def _pair(self, name: str, old: Piece, new: Piece, move: Move) -> Piece | None:
        if old.terms == new.terms and contains(old.box, new.box):
            return old
        if old.box == new.box and not old.terms & new.terms:
            value = self.new(name)
            move.gives.append((new.device, Add((old.value, new.value), value)))
            return replace(old, value=value, terms=old.terms | new.terms)
        apart = [axis for axis, (a, b) in enumerate(zip(old.box, new.box, strict=True)) if a != b]
        if old.terms != new.terms or len(apart) != 1 or old.box[apart[0]][1] != new.box[apart[0]][0]:
            return None
        value = self.new(name)
        move.gives.append((new.device, Join((old.value, new.value), apart[0], value)))
        return replace(old, value=value, box=hull([old.box, new.box]))

    def _cut(self, name: str, value: str, have: Box, box: Box, device: int, out: list[tuple[int, Action]]) -> str:
        if have == box:
            return value
        part = self.new(name)
        out.append((device, Cut(value, within(box, starts(have)), part)))
        return part

    def _local(
        self, name: str, have: Sequence[Piece], needs: Sequence[Need], terms: frozenset[object], move: Move
    ) -> bool:
        """Whether every device has what it needs."""
        found = dict[Need, Piece]()
        for device, box in needs:
            whole_here = [p for p in have if p.device == device and p.terms == terms and contains(p.box, box)]
            if not whole_here:
                return False
            found[device, box] = whole_here[0]
        for (device, box), piece in found.items():
            move.values[device, box] = self._cut(name, piece.value, piece.box, box, device, move.takes)
        return True

    # -- between layouts -----------------------------------------------------------------------------

    def _regular(
        self,
        name: str,
        shape: Shape,
        have: Sequence[Piece],
        needs: Sequence[Need],
        terms: frozenset[object],
        move: Move,
    ) -> bool:
        """Whether there is a path of layouts."""
        wanted = dict[int, list[Box]]()
        for device, box in needs:
            wanted.setdefault(device, []).append(box)
        hulls = {device: hull(boxes) for device, boxes in wanted.items()}
        if not all(covers(boxes, hulls[device]) for device, boxes in wanted.items()):
            return False
        before = as_layout(shape, [(p.device, p.box, p.terms) for p in have])
        after = as_layout(shape, [(device, box, terms) for device, box in hulls.items()])
        if before is None or after is None:
            return False
        try:
            steps = steps_between(before, after)
        except ConfigError:
            return False
        there = {piece.device: (piece.value, lengths(piece.box)) for piece in have}
        there = self._carried_out(name, steps, there, move, crosses={*before.devices} != {*after.devices})
        unaligned = bool(steps) and steps[-1][0].axis < 0 and steps[-1][0].kind is Kind.CHUNK
        for device, box in needs:
            has = whole(shape) if unaligned else hulls[device]
            move.values[device, box] = self._cut(name, there[device][0], has, box, device, move.takes)
        return True

    def _carried_out(
        self, name: str, steps: Steps, there: dict[int, tuple[str, Shape]], move: Move, *, crosses: bool
    ) -> dict[int, tuple[str, Shape]]:
        """Write the actions of ``steps``; return the value and the shape that each device has after them."""
        out = move.gives if crosses else move.takes
        for groups in steps:
            after = dict[int, tuple[str, Shape]]()
            for kind, sources, targets, axis, to_axis in groups:
                n = len(targets)
                if kind in _COLLECTIVES:
                    tag = self._tag()
                    for device in sources:
                        value, shape = there[device]
                        made = self.new(name)
                        out.append((device, Collective(kind, tag, sources, value, made, axis, to_axis)))
                        after[device] = made, _COLLECTIVES[kind](shape, n, axis, to_axis)
                elif kind in (Kind.CHUNK, Kind.VALUE_CHUNK):
                    for place, device in enumerate(sources):
                        after[device] = self._part(name, there[device], kind, n, place, axis, device, out)
                else:
                    out = move.takes
                    parts = list[tuple[str, Shape]]()
                    for place, target in enumerate(targets * len(sources)):
                        source = sources[place % len(sources)]
                        given = there[source]
                        if kind in (Kind.SCATTER, Kind.VALUE_SCATTER):
                            given = self._part(name, given, kind, n, place, axis, source, move.gives)
                        parts.append((self._sent(name, *given, source, target, move), given[1]))
                    if kind in (Kind.GATHER, Kind.VALUE_GATHER):
                        values = tuple(value for value, _ in parts)
                        made, shape = self.new(name), parts[0][1]
                        gathered = Join(values, axis, made) if kind is Kind.GATHER else Add(values, made)
                        out.append((targets[0], gathered))
                        parts = [(made, _times(shape, axis, len(sources)) if kind is Kind.GATHER else shape)]
                    after |= dict(zip(targets, parts, strict=True))
            there = after
        return there

    def _part(
        self,
        name: str,
        has: tuple[str, Shape],
        kind: Kind,
        n: int,
        place: int,
        axis: int,
        device: int,
        out: list[tuple[int, Action]],
    ) -> tuple[str, Shape]:
        """Take one of ``n`` parts of a value, or of a sum."""
        value, shape = has
        if kind is Kind.CHUNK and axis < 0:
            return has
        made = self.new(name)
        if kind in (Kind.VALUE_CHUNK, Kind.VALUE_SCATTER):
            out.append((device, Divide(value, n, made)))
            return made, shape
        length = shape[axis] // n
        box = [(0, side) for side in shape]
        box[axis] = (place * length, (place + 1) * length)
        out.append((device, Cut(value, tuple(box), made)))
        return made, lengths(tuple(box))

    def _sent(self, name: str, value: str, shape: Shape, source: int, target: int, move: Move) -> str:
        if source == target:
            return value
        tag, made = self._tag(), self.new(name)
        move.gives.append((source, Send(tag, value, target)))
        move.takes.append((target, Receive(tag, source, shape, made)))
        return made

    def _tag(self) -> int:
        self._number += 1
        return self._number

    # -- between parts of any form -------------------------------------------------------------------

    def _irregular(self, name: str, have: Sequence[Piece], need: Need, terms: frozenset[object], move: Move) -> None:
        device, box = need
        near = sorted(have, key=lambda piece: (piece.device != device, -len(piece.terms), piece.device))
        parts = dict[Box, str]()
        for cell in pieces(box, [piece.box for piece in have if overlap(piece.box, box)]):
            cover = _cover(terms, [piece for piece in near if contains(piece.box, cell)])
            if cover is None:
                raise ConfigError(f"no devices have the parts of {name} {cell} that device {device} needs")
            chosen = list[str]()
            for piece in cover:
                part = self._cut(name, piece.value, piece.box, cell, piece.device, move.gives)
                chosen.append(self._sent(name, part, lengths(cell), piece.device, device, move))
            parts[cell] = chosen[0]
            if len(chosen) > 1:
                parts[cell] = self.new(name)
                move.takes.append((device, Add(tuple(chosen), parts[cell])))
        for axis in range(len(box)):
            rows = dict[Box, list[Box]]()
            for part in sorted(parts):
                rows.setdefault((*part[:axis], box[axis], *part[axis + 1 :]), []).append(part)
            joined = dict[Box, str]()
            for row, members in rows.items():
                joined[row] = parts[members[0]]
                if len(members) > 1:
                    joined[row] = self.new(name)
                    move.takes.append((device, Join(tuple(parts[each] for each in members), axis, joined[row])))
            parts = joined
        move.values[need] = parts[box]


def _cover(terms: frozenset[object], have: Sequence[Piece]) -> list[Piece] | None:
    """Return pieces that have each term once, of several choices the first; None if there are none."""
    if not terms:
        return []
    one = min(terms, key=lambda term: (sum(term in piece.terms for piece in have), repr(term)))
    for piece in have:
        if one in piece.terms and piece.terms <= terms:
            rest = _cover(terms - piece.terms, have)
            if rest is not None:
                return [piece, *rest]
    return None


def _times(shape: Shape, axis: int, n: int) -> Shape:
    return tuple(length * n if place == axis else length for place, length in enumerate(shape))


def _over(shape: Shape, axis: int, n: int) -> Shape:
    return tuple(length // n if place == axis else length for place, length in enumerate(shape))


_COLLECTIVES: Mapping[Kind, Callable[[Shape, int, int, int], Shape]] = {
    Kind.ALL_GATHER: lambda shape, n, axis, _: _times(shape, axis, n),
    Kind.ALL_TO_ALL: lambda shape, n, axis, to: _over(_times(shape, axis, n), to, n),
    Kind.ALL_REDUCE: lambda shape, n, axis, _: shape,
    Kind.REDUCE_SCATTER: lambda shape, n, axis, _: _over(shape, axis, n),
}
"""The shape of a result."""


def covers(boxes: Sequence[Box], box: Box) -> bool:
    """Whether boxes inside another one fill it."""
    return all(any(contains(each, cell) for each in boxes) for cell in pieces(box, boxes))


def as_layout(shape: Shape, parts: Sequence[tuple[int, Box, frozenset[object]]]) -> Layout | None:
    """Return the layout in which each device has one of these parts, None if there is none: parts are uneven, a device has
    two, terms overlap, or some combination of part and terms is missing."""
    devices = [device for device, _, _ in parts]
    sizes = {lengths(box) for _, box, _ in parts}
    if len(set(devices)) < len(devices) or len(sizes) != 1:
        return None
    (length,) = sizes
    if any(side % part for side, part in zip(shape, length, strict=True)):
        return None
    if any(first % part for _, box, _ in parts for (first, _), part in zip(box, length, strict=True)):
        return None
    labels = list(dict.fromkeys(terms for _, _, terms in parts))
    if sum(map(len, labels)) > len(frozenset[object]().union(*labels)):
        return None
    cut = tuple(side // part for side, part in zip(shape, length, strict=True))
    holders = dict[tuple[int, ...], list[int]]()
    for device, box, terms in sorted(parts, key=lambda part: part[0]):
        place = tuple(first // part for first, part in zip(starts(box), length, strict=True))
        holders.setdefault((labels.index(terms), *place), []).append(device)
    number = len(labels)
    for parts_of_axis in cut:
        number *= parts_of_axis
    copies = {len(each) for each in holders.values()}
    if len(holders) != number or len(copies) != 1:
        return None
    (num_copies,) = copies
    order = [holders[place][copy] for copy in range(num_copies) for place in sorted(holders)]
    return Layout(shape, (num_copies, len(labels), *cut), tuple(order))
