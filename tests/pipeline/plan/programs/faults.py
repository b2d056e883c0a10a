"""Faults, planted into programs that are right: each kind changes actions as a mistake in moving tensors would."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise, permutations
from typing import Any

from msgspec.structs import replace

from pipeline.plan.layouts.vectors import Kind
from pipeline.plan.programs.actions import (
    Action,
    Add,
    Backward,
    Collective,
    Cut,
    Divide,
    Drop,
    Forward,
    Join,
    Program,
    Receive,
    Send,
    reads,
    writes,
)

Rows = list[list[Action]]
Fault = Callable[[Rows, random.Random], bool]
"""Changes the actions of all devices in place; False if there is nothing to change."""


def planted(program: Program, fault: Fault, rng: random.Random) -> Program | None:
    """Return the program with a fault, None if it has no place for one. Values are not dropped in it."""
    rows: Rows = [[action for action in row if not isinstance(action, Drop)] for row in program.actions]
    if not fault(rows, rng):
        return None
    return replace(program, actions=tuple(map(tuple, rows)))


def _collectives(rows: Rows, *kinds: Kind) -> Iterator[list[tuple[int, int, Collective]]]:
    """Yield each collective, as device, place and action of all who take part."""
    found = dict[int, list[tuple[int, int, Collective]]]()
    for device, row in enumerate(rows):
        for place, action in enumerate(row):
            if isinstance(action, Collective) and action.kind in kinds:
                found.setdefault(action.tag, []).append((device, place, action))
    yield from found.values()


def _choose(rng: random.Random, found: Sequence[Any]) -> Any:
    return rng.choice(found) if found else None


def _on_one(*kinds: Kind) -> Callable[[Callable[[Collective], list[Action]]], Fault]:
    """Make a fault of a function that gives what each device does in place of a collective."""

    def made(change: Callable[[Collective], list[Action]]) -> Fault:
        def fault(rows: Rows, rng: random.Random) -> bool:
            chosen = _choose(rng, list(_collectives(rows, *kinds)))
            for device, place, action in chosen or ():
                rows[device][place : place + 1] = change(action)
            return chosen is not None

        return fault

    return made


def _places(rows: Rows, kind: type[Any], fits: Callable[[Any], bool] = lambda _: True) -> list[tuple[int, int, Any]]:
    return [
        (device, place, action)
        for device, row in enumerate(rows)
        for place, action in enumerate(row)
        if isinstance(action, kind) and fits(action)
    ]


def _instead(kind: type[Any], change: Callable[[Any], Action], fits: Callable[[Any], bool] = lambda _: True) -> Fault:
    def fault(rows: Rows, rng: random.Random) -> bool:
        chosen = _choose(rng, _places(rows, kind, fits))
        if chosen is None:
            return False
        device, place, action = chosen
        rows[device][place] = change(action)
        return True

    return fault


def _wrong_axis(rows: Rows, rng: random.Random) -> bool:
    found = list(_collectives(rows, Kind.ALL_GATHER, Kind.REDUCE_SCATTER))
    chosen = _choose(rng, [each for each in found if each[0][2].axis > 0])
    for device, place, action in chosen or ():
        rows[device][place] = replace(action, axis=action.axis - 1)
    return chosen is not None


def _wrong_order(rows: Rows, rng: random.Random) -> bool:
    chosen = _choose(rng, list(_collectives(rows, Kind.ALL_GATHER, Kind.REDUCE_SCATTER, Kind.ALL_TO_ALL)))
    if chosen is None:
        return False
    devices = chosen[0][2].devices
    order = rng.choice([each for each in permutations(devices) if each != devices])
    for device, place, action in chosen:
        rows[device][place] = replace(action, devices=order)
    return True


def _wrong_group(rows: Rows, rng: random.Random) -> bool:
    """Two groups that do the same at once exchange a member."""
    pairs = []
    every = [each for each in _collectives(rows, *Kind) if len(each) == 2]
    for one in every:
        for other in every:
            a, b = one[0][2], other[0][2]
            if a.tag < b.tag and a.kind is b.kind and not set(a.devices) & set(b.devices) and b.tag - a.tag < 8:
                pairs.append((one, other))
    chosen = _choose(rng, pairs)
    if chosen is None:
        return False
    (first, second), (third, fourth) = chosen
    for one, other in ((first, third), (second, fourth)):
        group = one[0], other[0]
        for device, place, action in (one, other):
            rows[device][place] = replace(action, tag=one[2].tag + (0 if one is first else 1) * 10**6, devices=group)
    return True


def _stale(rows: Rows, rng: random.Random) -> bool:
    """A shard reads what it read in the micro-batch before."""
    found = []
    for device, row in enumerate(rows):
        last = dict[tuple[Any, ...], Forward]()
        for place, action in enumerate(row):
            if isinstance(action, Forward):
                key = action.operator, action.box
                before = last.get(key)
                if before is not None and before.micro_batch != action.micro_batch:
                    numbers = [n for n, (a, b) in enumerate(zip(before.inputs, action.inputs, strict=True)) if a != b]
                    found += [(device, place, action, before, number) for number in numbers]
                last[key] = action
    chosen = _choose(rng, found)
    if chosen is None:
        return False
    device, place, action, before, number = chosen
    inputs = list(action.inputs)
    inputs[number] = before.inputs[number]
    rows[device][place] = replace(action, inputs=tuple(inputs))
    return True


def _missing_send(rows: Rows, rng: random.Random) -> bool:
    chosen = _choose(rng, _places(rows, Send))
    if chosen is None:
        return False
    del rows[chosen[0]][chosen[1]]
    return True


def _wrong_chunk(rows: Rows, rng: random.Random) -> bool:
    """A part is taken one element too early."""

    def fits(cut: Cut) -> bool:
        return any(first for first, _ in cut.box)

    def change(cut: Cut) -> Cut:
        axis = next(axis for axis, (first, _) in enumerate(cut.box) if first)
        box = [(a - 1, b - 1) if place == axis else (a, b) for place, (a, b) in enumerate(cut.box)]
        return replace(cut, box=tuple(box))

    return _instead(Cut, change, fits)(rows, rng)


def _unreduced(rows: Rows, rng: random.Random) -> bool:
    """The gradient of a parameter is not added up over the devices."""
    found = []
    for each in _collectives(rows, Kind.ALL_REDUCE):
        device, place, _ = each[0]
        if not any(isinstance(later, Backward) for later in rows[device][place:]):
            found.append(each)
    chosen = _choose(rng, found)
    for device, place, action in chosen or ():
        rows[device][place] = Add((action.source,), action.output)
    return chosen is not None


def _cycle(rows: Rows, rng: random.Random) -> bool:
    """A device sends something only after it has received what depends on it."""
    found = []
    for device, place, send in _places(rows, Send):
        other = rows[send.to]
        at = next(n for n, action in enumerate(other) if isinstance(action, Receive) and action.tag == send.tag)
        later = {action.tag for action in other[at:] if isinstance(action, Send) and action.to == device}
        replies = [n for n, action in enumerate(rows[device]) if isinstance(action, Receive) and action.tag in later]
        found += [(device, place, reply) for reply in replies[:1]]
    chosen = _choose(rng, found)
    if chosen is None:
        return False
    device, place, reply = chosen
    rows[device].insert(reply, rows[device].pop(place))
    return True


def _swapped(rows: Rows, rng: random.Random) -> bool:
    """Two tensors of one form from one device arrive as each other."""
    found = []
    for device, row in enumerate(rows):
        receipts = [(place, action) for place, action in enumerate(row) if isinstance(action, Receive)]
        for (a, one), (b, other) in pairwise(receipts):
            # a part that is sent twice is the same in either place
            is_other = one.output.partition("#")[0] != other.output.partition("#")[0]
            if one.shape == other.shape and one.source == other.source and is_other:
                found.append((device, a, b))
    chosen = _choose(rng, found)
    if chosen is None:
        return False
    device, a, b = chosen
    one, other = rows[device][a], rows[device][b]
    assert isinstance(one, Receive) and isinstance(other, Receive)
    rows[device][a], rows[device][b] = replace(one, tag=other.tag), replace(other, tag=one.tag)
    return True


def _half_gradient(rows: Rows, rng: random.Random) -> bool:
    """A parameter's gradient lacks the last micro-batch."""
    chosen = _choose(rng, _places(rows, Add, lambda add: len(add.sources) == 2 and add.sources[0] != add.sources[1]))
    if chosen is None:
        return False
    device, place, add = chosen
    rows[device][place] = replace(add, sources=add.sources[:1])
    return True


def _early(rows: Rows, rng: random.Random) -> bool:
    """A value is dropped before its last reader."""
    device = rng.randrange(len(rows))
    chosen = _choose(rng, [(place, name) for place, action in enumerate(rows[device]) for name in reads(action)])
    if chosen is None:
        return False
    place, name = chosen
    rows[device].insert(place, Drop((name,)))
    return True


def _nothing_kept(rows: Rows, rng: random.Random) -> bool:
    return _instead(Forward, lambda action: replace(action, keep=False), lambda action: action.keep)(rows, rng)


def _wrong_shard(rows: Rows, rng: random.Random) -> bool:
    """A device computes the part of another one."""
    found = []
    for device, place, action in _places(rows, Forward):
        for _, _, other in _places(
            rows, Forward, lambda each, of=action: each.operator == of.operator and each.box != of.box
        ):
            found.append((device, place, replace(action, box=other.box)))
            break
    chosen = _choose(rng, found)
    if chosen is None:
        return False
    device, place, action = chosen
    rows[device][place] = action
    return True


def _other_given(rows: Rows, rng: random.Random) -> bool:
    """A shard reads another parameter of one form, or the data of another micro-batch."""
    found = []
    for device, row in enumerate(rows):
        made = {name for action in row for name in writes(action)}
        reads_of = [(place, action) for place, action in enumerate(row) if isinstance(action, Forward)]
        for place, action in reads_of:
            for _, other in reads_of:
                if other.operator.partition(".")[0] == action.operator.partition(".")[0] and other.box == action.box:
                    for number, (a, b) in enumerate(zip(action.inputs, other.inputs, strict=True)):
                        if a != b and not {a, b} & made:
                            found.append((device, place, action, number, b))
    chosen = _choose(rng, found)
    if chosen is None:
        return False
    device, place, action, number, name = chosen
    inputs = list(action.inputs)
    inputs[number] = name
    rows[device][place] = replace(action, inputs=tuple(inputs))
    return True


def _other_again(rows: Rows, rng: random.Random) -> bool:
    """A backward pass gets another parameter of one form again."""
    found = []
    for row in rows:
        again = [(place, action) for place, action in enumerate(row) if isinstance(action, Backward) and action.again]
        for (place, one), (_, other) in permutations(again, 2):
            is_alike = one.operator.partition(".")[0] == other.operator.partition(".")[0] and one.box == other.box
            if is_alike and one.operator != other.operator and len(one.again) == len(other.again):
                found.append((row, place, replace(one, again=other.again)))
    chosen = _choose(rng, found)
    if chosen is None:
        return False
    row, place, action = chosen
    row[place] = action
    return True


FAULTS: dict[str, Fault] = {
    "missing all-reduce": _on_one(Kind.ALL_REDUCE)(lambda c: [Add((c.source,), c.output)]),
    "wrong axis": _wrong_axis,
    "doubled partial sum": _instead(
        Add, lambda add: replace(add, sources=(*add.sources, add.sources[-1])), lambda add: len(add.sources) > 1
    ),
    "reduced twice": _on_one(Kind.ALL_REDUCE)(
        lambda c: [replace(c, output=f"{c.output}'"), replace(c, tag=-c.tag, source=f"{c.output}'")]
    ),
    "stale shard": _stale,
    "wrong order of devices": _wrong_order,
    "missing send": _missing_send,
    "wrong group": _wrong_group,
    "gather in place of reduce": _on_one(Kind.ALL_REDUCE)(lambda c: [replace(c, kind=Kind.ALL_GATHER, axis=0)]),
    "reduce in place of gather": _on_one(Kind.ALL_GATHER)(lambda c: [replace(c, kind=Kind.ALL_REDUCE, axis=-1)]),
    "chunk of a wrong index": _wrong_chunk,
    "overlapping shards": _instead(
        Join,
        lambda join: replace(join, sources=(*join.sources[:-1], join.sources[0])),
        lambda join: len(join.sources) > 1,
    ),
    "hole": _instead(Join, lambda join: replace(join, sources=join.sources[:-1]), lambda join: len(join.sources) > 1),
    "gradient not reduced over copies": _unreduced,
    "order with a cycle": _cycle,
    "average in place of sum": _on_one(Kind.ALL_REDUCE)(
        lambda c: [replace(c, output=f"{c.output}'"), Divide(f"{c.output}'", len(c.devices), c.output)]
    ),
    "two receipts exchanged": _swapped,
    "sum without a term": _half_gradient,
    "dropped before its last reader": _early,
    "nothing kept for the backward pass": _nothing_kept,
    "another device's shard": _wrong_shard,
    "another parameter, or other data": _other_given,
    "another parameter again": _other_again,
    "nothing gathered again": _instead(Backward, lambda b: replace(b, again=()), lambda b: bool(b.again)),
    "forgotten, and not gathered again": _instead(
        Forward, lambda f: replace(f, forgotten=(0,)), lambda f: f.keep and not f.forgotten
    ),
}
