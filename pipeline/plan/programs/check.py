"""Whether a program computes what its model computes, by playing it with symbols before anything runs.

Of each value it is known which part of which tensor it is, and which terms of that tensor's sum are in it and how often.
Whatever a shard reads must be the right part, with each term once; then what it computes is right too, and so on to the
loss and to the gradients. All of it follows from the actions and from the model: nothing here knows how they were made."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Final, NamedTuple

from pipeline.plan.layouts.boxes import Box, contains, lengths, overlap, pieces, starts, whole, within
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
)
from pipeline.plan.programs.operators import Model, Operator
from protocol.errors import ConfigError

_OUTPUT: Final = -1


class _Source(NamedTuple):
    """A computation whose shards' results add up."""

    operator: str
    micro_batch: int
    place: int
    """Number of the input whose gradient it is, or ``_OUTPUT``."""


_Terms = Mapping[tuple[_Source, Box], Fraction]
"""How often each shard's result is in a sum. The box is the shard's range of the dimensions that are added up."""
_GIVEN: Final[_Terms] = {(_Source("", 0, _OUTPUT), ()): Fraction(1)}


class _Tensor(NamedTuple):
    name: str
    micro_batch: int = -1
    """-1 for a parameter, its gradient, and the loss."""
    is_gradient: bool = False

    def __str__(self) -> str:
        of = "the gradient of " if self.is_gradient else ""
        return f"{of}{self.name}" + (f" of micro-batch {self.micro_batch}" if self.micro_batch >= 0 else "")


class _Region(NamedTuple):
    """A part of a value."""

    at: Box
    """Where it is in the value."""
    tensor: _Tensor
    start: tuple[int, ...]
    """Where its first element is in the tensor."""
    terms: _Terms

    def cut(self, box: Box) -> _Region:
        moved = (zero + first - at for zero, (first, _), (at, _) in zip(self.start, box, self.at, strict=True))
        return self._replace(at=box, start=tuple(moved))


@dataclass(frozen=True)
class _Value:
    shape: tuple[int, ...]
    regions: tuple[_Region, ...]

    def cut(self, box: Box) -> _Value:
        found = [(region, shared) for region in self.regions if (shared := overlap(region.at, box)) is not None]
        kept = (region.cut(shared) for region, shared in found)
        return _Value(lengths(box), tuple(each._replace(at=within(each.at, starts(box))) for each in kept))


class _Fault(Exception):
    """What is wrong, without where."""


class Moved(NamedTuple):
    """A collective or a send that was played."""

    kind: Kind
    """A send is a move."""
    devices: tuple[int, ...]
    """Of a send: from which to which."""
    tensor: str
    micro_batch: int
    """-1 for a parameter, its gradient, and the loss."""
    is_gradient: bool
    elements: int
    """That each device gives."""

    @property
    def sent(self) -> float:
        """Elements that each device sends: of a collective in a ring (Patarasu and Yuan 2009)."""
        n = len(self.devices)
        shares = {Kind.ALL_REDUCE: 2 * (n - 1) / n, Kind.ALL_GATHER: n - 1, Kind.MOVE: 1.0}
        return shares.get(self.kind, (n - 1) / n) * self.elements


def check_program(model: Model, program: Program) -> tuple[Moved, ...]:
    """Return what moves in a program of which every device gets loss and gradients of ``model``. Raises ConfigError with
    the first fault: which device, which operator or collective, which tensor, what is wrong with it."""
    player = _Player(model, program)
    player.play()
    return tuple(player.moved)


class _Player:
    def __init__(self, model: Model, program: Program) -> None:
        self._model, self._program = model, program
        self.moved = list[Moved]()
        self._values = [
            {each.value: _single(each.box, _Tensor(each.tensor, each.micro_batch), _GIVEN) for each in row}
            for row in program.given
        ]
        self._kept: list[dict[tuple[str, int, Box], tuple[int, ...]]] = [{} for _ in program.actions]
        """What has been computed and kept, with the inputs that have been forgotten."""
        self._sent: dict[tuple[int, int, int], _Value] = {}
        """By tag, sender and receiver."""
        self._computed_on: defaultdict[tuple[_Source, Box], set[int]] = defaultdict(set)
        self._sums: dict[_Tensor, dict[_Source, Box]] = {}
        self._places = [0] * len(program.actions)

    def play(self) -> None:
        goes_on = True
        while goes_on:
            goes_on = False
            for device in range(len(self._places)):
                while (action := self._next(device)) is not None and self._acts(device, action):
                    goes_on = True
        self._check_end()

    def _next(self, device: int) -> Action | None:
        row, place = self._program.actions[device], self._places[device]
        return row[place] if place < len(row) else None

    def _acts(self, device: int, action: Action) -> bool:
        """Do the next action of a device; False if it has to wait for others."""
        try:
            if isinstance(action, Collective):
                return self._collective(action, device)
            if isinstance(action, Receive) and (action.tag, action.source, device) not in self._sent:
                return False
            self._alone(device, action)
        except _Fault as fault:
            raise ConfigError(f"device {device}, {_said(action)}: {fault}") from None
        self._places[device] += 1
        return True

    def _alone(self, device: int, action: Action) -> None:
        given = [self._value(device, name) for name in reads(action)]
        match action:
            case Forward():
                self._put(device, action.output, self._forward(device, action, given))
            case Backward():
                self._backward(device, action, given)
            case Cut():
                if not contains(whole(given[0].shape), action.box):
                    raise _Fault(f"{_range(action.box)} of {action.source}, which is {list(given[0].shape)}")
                self._put(device, action.output, given[0].cut(action.box))
            case Join():
                self._put(device, action.output, _joined(given, action.axis))
            case Add():
                self._put(device, action.output, _added(given))
            case Divide():
                self._put(device, action.output, _divided(given[0], action.by))
            case Send():
                key = action.tag, device, action.to
                if key in self._sent or not 0 <= action.to < len(self._values) or action.to == device:
                    raise _Fault(f"tag {action.tag} goes to device {action.to} twice, or to no other device")
                self._sent[key] = given[0]
                self._note(Kind.MOVE, (device, action.to), given[0])
            case Receive():
                value = self._sent.pop((action.tag, action.source, device))
                if value.shape != action.shape:
                    raise _Fault(f"device {action.source} sends {list(value.shape)}; expected {list(action.shape)}")
                self._put(device, action.output, value)
            case Drop():
                for name in action.values:
                    self._value(device, name)
                    del self._values[device][name]
            case Collective():
                raise AssertionError("not alone")

    def _value(self, device: int, name: str) -> _Value:
        if name not in self._values[device]:
            raise _Fault(f"reads {name}, which is not there: nothing made it before, or it was dropped")
        return self._values[device][name]

    def _put(self, device: int, name: str, value: _Value) -> None:
        if name in self._values[device]:
            raise _Fault(f"makes {name}, which is there already; expected a name of its own for each value")
        self._values[device][name] = value

    # -- operators -----------------------------------------------------------------------------------

    def _operator(self, action: Forward | Backward) -> Operator:
        operator = self._model.by_name.get(action.operator)
        if operator is None or not 0 <= action.micro_batch < self._program.num_micro_batches:
            raise _Fault("the model has no such operator or micro-batch")
        full = self._model.boxes[operator.name]
        for name, side, (first, end) in zip(operator.rule.dimensions, full, action.box, strict=True):
            if not side[0] <= first < end <= side[1] or (name in operator.rule.whole and (first, end) != side):
                raise _Fault(
                    f"computes {name} {first}:{end} of 0:{side[1]}; expected a part, or all of what must stay whole"
                )
        return operator

    def _forward(self, device: int, action: Forward, given: Sequence[_Value]) -> _Value:
        operator = self._operator(action)
        rule = operator.rule
        if len(given) != len(operator.inputs):
            raise _Fault(f"reads {len(given)} values; expected {len(operator.inputs)}")
        for number, value in enumerate(given):
            self._check_input(operator, number, value, action)
        if action.keep:
            if not set(action.forgotten) <= set(range(len(given))):
                raise _Fault(f"forgets inputs {list(action.forgotten)} of {len(given)}")
            self._kept[device][action.operator, action.micro_batch, action.box] = action.forgotten
        micro = -1 if operator.output == self._model.loss else action.micro_batch
        terms = self._terms(device, action, _OUTPUT, rule.rest(rule.output, action.box))
        return _single(rule.part(rule.output, action.box), _Tensor(operator.output, micro), terms)

    def _check_input(self, operator: Operator, number: int, value: _Value, action: Forward | Backward) -> None:
        name = operator.inputs[number]
        micro = -1 if name in self._model.parameters else action.micro_batch
        self._check_value(value, _Tensor(name, micro), operator.rule.part(operator.rule.inputs[number], action.box))

    def _backward(self, device: int, action: Backward, given: Sequence[_Value]) -> None:
        operator = self._operator(action)
        rule = operator.rule
        key = action.operator, action.micro_batch, action.box
        if key not in self._kept[device]:
            raise _Fault("its forward pass kept nothing on this device, or it was used already")
        forgotten, has_gradient = self._kept[device].pop(key), action.gradient is not None
        if has_gradient == (operator.output == self._model.loss):
            raise _Fault(
                f"expected {'no gradient for the loss' if has_gradient else f'the gradient of {operator.output}'}"
            )
        if len(action.again) != len(forgotten):
            raise _Fault(f"gets {len(action.again)} inputs again; expected those that were forgotten, {len(forgotten)}")
        for value in given[:1] if has_gradient else []:
            tensor = _Tensor(operator.output, action.micro_batch, is_gradient=True)
            self._check_value(value, tensor, rule.part(rule.output, action.box))
        for number, value in zip(forgotten, given[has_gradient:], strict=True):
            self._check_input(operator, number, value, action)
        for number, (name, output) in enumerate(zip(operator.inputs, action.outputs, strict=True)):
            if output is not None:
                micro = -1 if name in self._model.parameters else action.micro_batch
                terms = self._terms(device, action, number, rule.rest(rule.inputs[number], action.box))
                box = rule.part(rule.inputs[number], action.box)
                self._put(device, output, _single(box, _Tensor(name, micro, is_gradient=True), terms))

    def _terms(self, device: int, action: Forward | Backward, place: int, rest: Box) -> _Terms:
        term = _Source(action.operator, action.micro_batch, place), rest
        self._computed_on[term].add(device)
        return {term: Fraction(1)}

    def _note(self, kind: Kind, devices: tuple[int, ...], value: _Value) -> None:
        tensor = value.regions[0].tensor
        elements = math.prod(value.shape)
        self.moved.append(Moved(kind, devices, tensor.name, tensor.micro_batch, tensor.is_gradient, elements))

    # -- what is expected ----------------------------------------------------------------------------

    def _expected(self, tensor: _Tensor) -> dict[_Source, Box]:
        """Return the whole of what a tensor's sum is taken over, by who computes it."""
        if tensor not in self._sums:
            self._sums[tensor] = self._sum(tensor)
        return self._sums[tensor]

    def _sum(self, tensor: _Tensor) -> dict[_Source, Box]:
        micros = [tensor.micro_batch] if tensor.micro_batch >= 0 else list(range(self._program.num_micro_batches))
        if tensor.is_gradient:
            readers = self._model.gradients.get(tensor.name, ())
            return {
                _Source(operator.name, micro, number): operator.rule.rest(
                    operator.rule.inputs[number], self._model.boxes[operator.name]
                )
                for operator, number in readers
                for micro in micros
            }
        operator = self._model.producers[tensor.name]
        rest = operator.rule.rest(operator.rule.output, self._model.boxes[operator.name])
        return {_Source(operator.name, micro, _OUTPUT): rest for micro in micros}

    def _check_value(self, value: _Value, tensor: _Tensor, box: Box) -> None:
        """Raise a fault unless ``value`` is this part of ``tensor``, with each term once."""
        wanted = f"{tensor} {_range(box)}"
        if value.shape != lengths(box):
            raise _Fault(f"gets {_content(value)}, {list(value.shape)}; expected {wanted}")
        for region in value.regions:
            start = tuple(first + at for (first, _), (at, _) in zip(box, region.at, strict=True))
            if region.tensor != tensor or region.start != start:
                raise _Fault(f"gets {_content(value)}; expected {wanted}")
            if tensor.is_gradient or tensor.name in self._model.producers:
                self._check_terms(region.terms, self._expected(tensor), wanted)
            elif region.terms != _GIVEN:
                raise _Fault(f"gets a sum of copies of {wanted}; expected it once")

    def _check_terms(self, terms: _Terms, expected: Mapping[_Source, Box], wanted: str) -> None:
        by_source = dict[_Source, dict[Box, Fraction]]()
        for (source, rest), often in terms.items():
            by_source.setdefault(source, {})[rest] = often
        for source, full in expected.items():
            found = by_source.pop(source, {})
            if found == {full: 1}:
                continue
            for cell in pieces(full, found):
                often = sum((times for rest, times in found.items() if contains(rest, cell)), Fraction(0))
                if often != 1:
                    raise _Fault(f"of the sum that is {wanted}, {self._part(source, cell)} is {_how_often(often)}")
        if by_source:
            raise _Fault(
                f"the sum that is {wanted} has in it {self._part(next(iter(by_source)), ())}, which is no part of it"
            )

    def _part(self, source: _Source, cell: Box) -> str:
        """Say which part of a sum, and who computes it."""
        by = sorted(
            device
            for (other, rest), devices in self._computed_on.items()
            if other == source and contains(rest, cell or rest)
            for device in devices
        )
        names = self._model.by_name[source.operator].rule
        own = names.output if source.place == _OUTPUT else names.inputs[source.place]
        dims = [name for name in names.dimensions if name not in own]
        over = ", ".join(f"{name} {first}:{end}" for name, (first, end) in zip(dims, cell, strict=False))
        where = f" (computed on device {', '.join(map(str, by))})" if by else " (computed nowhere so far)"
        return f"the part of {source.operator!r}, micro-batch {source.micro_batch}{', ' if over else ''}{over}{where},"

    # -- several devices -----------------------------------------------------------------------------

    def _collective(self, action: Collective, device: int) -> bool:
        if device not in action.devices or len(set(action.devices)) < len(action.devices):
            raise _Fault(f"expected device {device} to be one of its devices, and each once")
        if not set(action.devices) <= set(range(len(self._places))):
            raise _Fault(f"expected devices 0 to {len(self._places) - 1}")
        rows = [self._next(each) for each in action.devices]
        calls = [row for row in rows if isinstance(row, Collective) and row.tag == action.tag]
        for call in calls:
            if (call.kind, call.devices, call.axis, call.to_axis) != (
                action.kind,
                action.devices,
                action.axis,
                action.to_axis,
            ):
                raise _Fault(
                    f"device {device} takes part in {_said(action)}, another device in {_said(call)}; expected the same"
                )
        if len(calls) < len(rows):
            return False
        given = [self._value(each, call.source) for each, call in zip(action.devices, calls, strict=True)]
        self._note(action.kind, action.devices, given[0])
        for each, call, value in zip(action.devices, calls, _exchanged(action, given), strict=True):
            self._put(each, call.output, value)
            self._places[each] += 1
        return True

    def _check_end(self) -> None:
        waiting = [
            (device, action) for device in range(len(self._places)) if (action := self._next(device)) is not None
        ]
        if waiting:
            said = "; ".join(f"device {device} waits in {_said(action)}" for device, action in waiting)
            raise ConfigError(f"the devices wait for one another forever: {said}")
        if self._sent:
            tag, source, target = next(iter(self._sent))
            content = _content(self._sent[tag, source, target])
            raise ConfigError(f"device {source} sends {content} to device {target}, which never receives it")
        try:
            self._check_results()
        except _Fault as fault:
            raise ConfigError(f"at the end, {fault}") from None

    def _check_results(self) -> None:
        held: dict[str, list[Box]] = {name: [] for name in self._model.parameters}
        for device, row in enumerate(self._program.given):
            for each in row:
                if each.micro_batch >= 0:
                    continue
                held[each.tensor].append(each.box)
                if each.tensor in self._model.gradients:
                    if each.gradient is None:
                        raise _Fault(f"device {device} has no gradient of {each.tensor} {_range(each.box)}")
                    try:
                        self._check_value(
                            self._value(device, each.gradient), _Tensor(each.tensor, is_gradient=True), each.box
                        )
                    except _Fault as fault:
                        raise _Fault(f"device {device}: {fault}") from None
        for name, boxes in held.items():
            for cell in pieces(whole(self._model.shapes[name]), boxes):
                if not any(contains(box, cell) for box in boxes):
                    raise _Fault(f"no device has parameter {name} {_range(cell)}")
        device, name = self._program.loss
        try:
            self._check_value(self._value(device, name), _Tensor(self._model.loss), ())
        except _Fault as fault:
            raise _Fault(f"device {device}: {fault}") from None


# -- values ----------------------------------------------------------------------------------------


def _single(box: Box, tensor: _Tensor, terms: _Terms) -> _Value:
    shape = lengths(box)
    return _Value(shape, (_Region(whole(shape), tensor, starts(box), terms),))


def _joined(values: Sequence[_Value], axis: int) -> _Value:
    regions, length = list[_Region](), 0
    for value in values:
        others = [(*each.shape[:axis], *each.shape[axis + 1 :]) for each in (value, values[0])]
        if others[0] != others[1]:
            raise _Fault(
                f"joins {list(values[0].shape)} and {list(value.shape)} along axis {axis}; expected equal other axes"
            )
        for region in value.regions:
            first, end = region.at[axis]
            at = (*region.at[:axis], (first + length, end + length), *region.at[axis + 1 :])
            regions.append(region._replace(at=at))
        length += value.shape[axis]
    shape = values[0].shape
    return _Value((*shape[:axis], length, *shape[axis + 1 :]), tuple(regions))


def _added(values: Sequence[_Value]) -> _Value:
    total = values[0]
    for value in values[1:]:
        if value.shape != total.shape:
            raise _Fault(f"adds {_content(total)}, {list(total.shape)}, and {_content(value)}, {list(value.shape)}")
        regions = list[_Region]()
        for one in total.regions:
            for other in value.regions:
                shared = overlap(one.at, other.at)
                if shared is None:
                    continue
                a, b = one.cut(shared), other.cut(shared)
                if (a.tensor, a.start) != (b.tensor, b.start):
                    raise _Fault(f"adds {_content(total)} and {_content(value)}; expected the same part of one tensor")
                terms = dict(a.terms)
                for term, often in b.terms.items():
                    terms[term] = terms.get(term, Fraction(0)) + often
                regions.append(a._replace(terms=terms))
        total = _Value(total.shape, tuple(regions))
    return total


def _divided(value: _Value, by: int) -> _Value:
    regions = (each._replace(terms={term: often / by for term, often in each.terms.items()}) for each in value.regions)
    return _Value(value.shape, tuple(regions))


def _exchanged(action: Collective, given: Sequence[_Value]) -> list[_Value]:
    """Return what each device of a collective gets."""
    n, axes = len(given), range(len(given[0].shape))
    is_sum = action.kind is Kind.ALL_REDUCE
    if not is_sum and (action.axis not in axes or (action.kind is Kind.ALL_TO_ALL and action.to_axis not in axes)):
        raise _Fault(f"joins or cuts {_content(given[0])} along an axis that it does not have")

    def parts(value: _Value, axis: int) -> list[_Value]:
        if value.shape[axis] % n:
            raise _Fault(f"cuts {_content(value)} into {n} along axis {axis}; expected a length that {n} divides")
        step = value.shape[axis] // n
        sides = whole(value.shape)
        return [
            value.cut((*sides[:axis], (place * step, (place + 1) * step), *sides[axis + 1 :])) for place in range(n)
        ]

    match action.kind:
        case Kind.ALL_GATHER:
            return [_joined(given, action.axis)] * n
        case Kind.ALL_REDUCE:
            return [_added(given)] * n
        case Kind.REDUCE_SCATTER:
            return parts(_added(given), action.axis)
        case Kind.ALL_TO_ALL:
            rows = [parts(value, action.to_axis) for value in given]
            return [_joined(column, action.axis) for column in zip(*rows, strict=True)]
        case _:
            raise _Fault("expected an all-gather, all-to-all, all-reduce or reduce-scatter")


# -- words -----------------------------------------------------------------------------------------


def _said(action: Action) -> str:
    match action:
        case Forward():
            return f"forward pass of {action.operator!r}, micro-batch {action.micro_batch}"
        case Backward():
            return f"backward pass of {action.operator!r}, micro-batch {action.micro_batch}"
        case Collective():
            return f"{action.kind} {action.tag} of {action.source} on devices {', '.join(map(str, action.devices))}"
        case Send():
            return f"send {action.tag} of {action.source} to device {action.to}"
        case Receive():
            return f"receive {action.tag} of {action.output} from device {action.source}"
        case Drop():
            return f"drop of {', '.join(action.values)}"
        case Cut() | Join() | Add() | Divide():
            return f"{type(action).__name__.lower()} that makes {action.output}"


def _content(value: _Value) -> str:
    """Say what a value is."""
    said = list[str]()
    for region in value.regions:
        box = tuple((first, first + length) for first, length in zip(region.start, lengths(region.at), strict=True))
        said.append(f"{region.tensor} {_range(box)}")
    return " next to ".join(dict.fromkeys(said)) or "nothing"


def _range(box: Box) -> str:
    return f"[{', '.join(f'{first}:{end}' for first, end in box)}]"


def _how_often(often: Fraction) -> str:
    return "missing" if not often else f"in it {often} times; expected once"
