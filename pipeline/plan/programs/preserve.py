"""The third phase, dependency preservation: a placed model becomes a program, with all that moves between its shards.

What a shard reads is moved to it from whoever made it, forward and backward; a parameter's gradient is added up over
micro-batches where it is made, and moved once at the end. What leaves a block for other devices is sent when the block
ends, and received where it is needed.

Devices that read the same part of a parameter may store a part of it each, by the stages of ZeRO (Rajbhandari et al. 2020):

    1    the parts are gathered once, and gradients are reduced to them at the end
    2    gradients are reduced to parts after each backward pass
    3    parts are gathered for each pass of a block, and forgotten after it"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

from pipeline.plan.layouts.boxes import Box, hull, lengths
from pipeline.plan.programs.actions import Action, Add, Backward, Drop, Forward, Given, Program, reads, writes
from pipeline.plan.programs.moves import Move, Mover, Need, Piece, as_layout, covers
from pipeline.plan.programs.operators import Operator
from pipeline.plan.programs.placing import Placed, backward_of
from pipeline.plan.programs.split import Shard
from protocol.errors import ConfigError

_Contributions = dict[tuple[str, int], list[Piece]]
"""Parts of a gradient, by the operator that computed them and the number of its input."""
Zero = Literal[0, 1, 2, 3]


def preserve(placed: Placed, zero: Zero = 0) -> Program:
    """Return the program of a placed model, whose parameters are stored as in this stage of ZeRO; 0: where they are read."""
    builder = _Builder(placed, zero)
    forward = {block: block for block in placed.stages}
    backward = {backward_of(block): block for block in placed.stages}
    for step in placed.steps:
        if step.block in forward:
            stage = placed.stages[step.block]
            builder.forward(step.block, step.micro_batch, keep=not stage.recompute)
            builder.send_results(step.block, step.micro_batch)
        else:
            builder.backward(backward[step.block], step.micro_batch)
    return builder.finished()


class _Builder:
    def __init__(self, placed: Placed, zero: Zero) -> None:
        self._placed, self._model, self._zero = placed, placed.model, zero
        self._rows: list[list[Action]] = [[] for _ in range(placed.num_devices)]
        self._given: list[dict[tuple[str, int, Box], str]] = [{} for _ in range(placed.num_devices)]
        self._mover = Mover()
        self._made: dict[tuple[str, int], list[Piece]] = {}
        """What there is of a tensor, by its name and micro-batch."""
        self._moves: dict[tuple[str, int, frozenset[Need]], Move] = {}
        self._read: dict[tuple[str, Need], str] = {}
        """Parts of parameters as shards read them."""
        self._gradients: dict[tuple[str, int], _Contributions] = {}
        """Of tensors, computed in the block that made them or not yet sent there."""
        self._gradient_moves: dict[tuple[str, int], list[Move]] = {}
        self._sums: dict[tuple[str, str, int], dict[tuple[int, Box, Box], str]] = {}
        """Gradients of parameters so far: by tensor, operator and input; by device, part and terms."""
        self._reduced: dict[tuple[str, Need], str] = {}
        """Gradients of the parts that are stored."""
        self._losses: dict[tuple[int, frozenset[object]], str] = {}
        self._stored = self._parts_stored()
        self._gathered = set[str]()
        """Parameters of which shards read more than is stored on their device."""
        if zero:
            self._store_in_parts()

    def forward(self, block: str, micro: int, *, keep: bool, again: bool = False) -> None:
        """``again``: right before the backward pass."""
        self._forget()
        for operator in self._operators(block):
            shards = self._placed.shards[operator.name]
            inputs = [
                self._values(name, micro, [self._need(each, operator.rule.inputs[number]) for each in shards])
                for number, name in enumerate(operator.inputs)
            ]
            made, forgotten = list[Piece](), () if again else self._forgotten(operator)
            for shard in shards:
                device = self._placed.device(shard)
                values = tuple(
                    inputs[number][self._need(shard, names)] for number, names in enumerate(operator.rule.inputs)
                )
                output = self._mover.new(f"{operator.output}.{micro}")
                kept = keep and operator.backward
                self._rows[device].append(
                    Forward(operator.name, micro, shard.box, values, output, kept, forgotten if kept else ())
                )
                rest = operator.rule.rest(operator.rule.output, shard.box)
                made.append(
                    Piece(device, output, operator.rule.part(operator.rule.output, shard.box), frozenset({rest}))
                )
            self._made[operator.output, micro] = made
            if operator.output == self._model.loss and keep:
                self._add_loss(made)

    def send_results(self, block: str, micro: int) -> None:
        """Send what other blocks need."""
        own = set(self._placed.stages[block].operators)
        made = {operator.output for operator in self._operators(block)}
        for operator in self._model.operators:
            if operator.name not in own:
                for number, name in enumerate(operator.inputs):
                    if name in made:
                        shards = self._placed.shards[operator.name]
                        self._move(name, micro, [self._need(each, operator.rule.inputs[number]) for each in shards])

    def backward(self, block: str, micro: int) -> None:
        stage = self._placed.stages[block]
        operators = [operator for operator in self._operators(block) if operator.backward]
        made = {operator.output for operator in operators}
        if stage.recompute:
            for key in [key for key in self._moves if key[1] == micro and key[0] in made]:
                del self._moves[key]
            self.forward(block, micro, keep=True, again=True)
        else:
            self._forget()
        for operator in reversed(operators):
            self._backward(operator, micro, () if stage.recompute else self._forgotten(operator))
        for name in dict.fromkeys(name for operator in operators for name in operator.inputs):
            if name not in made and (found := self._gradients.pop((name, micro), None)) is not None:
                moves = self._gradient_moves.setdefault((name, micro), [])
                moves += self._gradient_parts(name, micro, found)
                for move in moves:
                    self._give(move)
        if self._zero >= 2:
            self._reduce_gradients()

    def finished(self) -> Program:
        last = self._model.producers[self._model.loss].name
        loss_device = self._placed.stages[self._placed.stage_of[last]].devices[0]
        pieces = [Piece(device, value, (), terms) for (device, terms), value in self._losses.items()]
        move = self._mover.move("loss", (), pieces, [(loss_device, ())])
        self._take(move)
        loss = loss_device, move.values[loss_device, ()]
        self._reduce_gradients()
        given = tuple(
            tuple(
                Given(tensor, micro, box, value, self._reduced.get((tensor, (device, box))) if micro < 0 else None)
                for (tensor, micro, box), value in row.items()
            )
            for device, row in enumerate(self._given)
        )
        kept = [{value for each in row for value in (each.value, each.gradient) if value} for row in given]
        kept[loss[0]].add(loss[1])
        actions = tuple(tuple(_with_drops(row, kept[device])) for device, row in enumerate(self._rows))
        return Program(self._placed.num_micro_batches, given, actions, loss)

    # -- values --------------------------------------------------------------------------------------

    def _operators(self, block: str) -> list[Operator]:
        own = set(self._placed.stages[block].operators)
        return [operator for operator in self._model.operators if operator.name in own]

    def _need(self, shard: Shard, names: tuple[str, ...]) -> Need:
        operator = self._model.by_name[shard.operator]
        return self._placed.device(shard), operator.rule.part(names, shard.box)

    def _values(self, name: str, micro: int, needs: Sequence[Need]) -> dict[Need, str]:
        """Return where each device has what it needs of a tensor; what is not there yet is moved."""
        if name in self._model.parameters:
            return self._parameter(name, needs)
        if name in self._model.data:
            return {(device, box): self._give_data(name, micro, device, box) for device, box in needs}
        move = self._move(name, micro, needs)
        self._take(move)
        return move.values

    def _move(self, name: str, micro: int, needs: Sequence[Need]) -> Move:
        key = name, micro, frozenset(needs)
        if (name, micro) not in self._made:
            raise ConfigError(
                f"nothing has made {name!r} of micro-batch {micro} when it is read; expected an order in which it is"
            )
        if key not in self._moves:
            self._moves[key] = self._mover.move(
                f"{name}.{micro}", self._model.shapes[name], self._made[name, micro], needs
            )
            self._give(self._moves[key])
        return self._moves[key]

    def _give(self, move: Move) -> None:
        for device, action in move.gives:
            self._rows[device].append(action)
        move.gives.clear()

    def _take(self, move: Move) -> None:
        self._give(move)
        for device, action in move.takes:
            self._rows[device].append(action)
        move.takes.clear()

    def _give_data(self, name: str, micro: int, device: int, box: Box) -> str:
        return self._given[device].setdefault((name, micro, box), f"{name}.{micro}{list(map(list, box))}")

    def _parameter(self, name: str, needs: Sequence[Need]) -> dict[Need, str]:
        missing = [need for need in dict.fromkeys(needs) if (name, need) not in self._read]
        if missing:
            have = [
                Piece(device, self._given_part(name, device, box), box, frozenset({name}))
                for (tensor, device), boxes in self._stored.items()
                if tensor == name
                for box in boxes
            ]
            move = self._mover.move(name, self._model.shapes[name], have, missing)
            self._take(move)
            self._read |= {(name, need): move.values[need] for need in missing}
        return {need: self._read[name, need] for need in needs}

    def _given_part(self, name: str, device: int, box: Box) -> str:
        return self._given[device].setdefault((name, -1, box), f"{name}{list(map(list, box))}")

    def _forget(self) -> None:
        """A pass of a block begins: what the one before has gathered is gone."""
        if self._zero == 3:
            self._read = {key: value for key, value in self._read.items() if key[0] not in self._gathered}

    def _forgotten(self, operator: Operator) -> tuple[int, ...]:
        """Return the numbers of the inputs that are gathered again for the backward pass."""
        if self._zero < 3:
            return ()
        return tuple(number for number, name in enumerate(operator.inputs) if name in self._gathered)

    def _parts_stored(self) -> dict[tuple[str, int], list[Box]]:
        """Return the parts of each parameter that each device stores: one, if what its shards read is one part."""
        parts = dict[tuple[str, int], dict[Box, None]]()
        for operator in self._model.operators:
            for number, name in enumerate(operator.inputs):
                if name in self._model.parameters:
                    for shard in self._placed.shards[operator.name]:
                        device, box = self._need(shard, operator.rule.inputs[number])
                        parts.setdefault((name, device), {})[box] = None
        one = {key: hull(boxes) for key, boxes in parts.items()}
        return {key: [one[key]] if covers(list(boxes), one[key]) else list(boxes) for key, boxes in parts.items()}

    def _store_in_parts(self) -> None:
        """Cut what is stored over the devices that store the same."""
        same = dict[tuple[str, Box], list[int]]()
        for (name, device), boxes in self._stored.items():
            for box in boxes:
                same.setdefault((name, box), []).append(device)
        self._stored = {key: [] for key in self._stored}
        for (name, box), devices in same.items():
            parts = _even_parts(box, len(devices))
            self._gathered |= {name} if len(parts) > 1 else set()
            for place, device in enumerate(devices):
                self._stored[name, device].append(parts[place % len(parts)])

    def _add_loss(self, made: Sequence[Piece]) -> None:
        for piece in made:
            key = piece.device, piece.terms
            self._losses[key] = self._added(self._losses.get(key), piece.value, piece.device)

    def _added(self, old: str | None, new: str, device: int) -> str:
        if old is None:
            return new
        both = self._mover.new("sum")
        self._rows[device].append(Add((old, new), both))
        return both

    # -- gradients -----------------------------------------------------------------------------------

    def _backward(self, operator: Operator, micro: int, forgotten: tuple[int, ...]) -> None:
        shards, rule, gradients = self._placed.shards[operator.name], operator.rule, dict[Need, str]()
        if operator.output != self._model.loss:
            gradients = self._gradient(operator.output, micro, [self._need(each, rule.output) for each in shards])
        again = [
            (
                rule.inputs[number],
                self._parameter(operator.inputs[number], [self._need(s, rule.inputs[number]) for s in shards]),
            )
            for number in forgotten
        ]
        for shard in shards:
            device = self._placed.device(shard)
            outputs = [
                self._mover.new(f"d {name}.{micro}")
                if (operator, number) in self._model.gradients.get(name, ())
                else None
                for number, name in enumerate(operator.inputs)
            ]
            gradient = gradients.get(self._need(shard, rule.output))
            values = tuple(found[self._need(shard, names)] for names, found in again)
            self._rows[device].append(Backward(operator.name, micro, shard.box, gradient, tuple(outputs), values))
            for number, (name, value) in enumerate(zip(operator.inputs, outputs, strict=True)):
                if value is None:
                    continue
                box, rest = rule.part(rule.inputs[number], shard.box), rule.rest(rule.inputs[number], shard.box)
                if name in self._model.parameters:
                    sums = self._sums.setdefault((name, operator.name, number), {})
                    # shards of one device may be copies: each of them is added to a sum of its own
                    key = device, box, rest
                    sums[key] = self._added(sums.get(key), value, device)
                else:
                    found = self._gradients.setdefault((name, micro), {}).setdefault((operator.name, number), [])
                    found.append(Piece(device, value, box, frozenset({(operator.name, number, rest)})))

    def _gradient(self, name: str, micro: int, needs: Sequence[Need]) -> dict[Need, str]:
        """Return where each device has its part of a tensor's gradient, added up over the operators that read the tensor."""
        moves = self._gradient_moves.pop((name, micro), [])
        moves += self._gradient_parts(name, micro, self._gradients.pop((name, micro), {}))
        for move in moves:
            self._take(move)
        return self._total(moves, needs)

    def _gradient_parts(self, name: str, micro: int, found: _Contributions) -> list[Move]:
        producer = self._model.producers[name]
        needs = [self._need(shard, producer.rule.output) for shard in self._placed.shards[producer.name]]
        return self._moved(f"d {name}.{micro}", name, found, needs)

    def _reduce_gradients(self) -> None:
        """Add up what there is of the parameters' gradients, where they are stored."""
        for name in dict.fromkeys(tensor for tensor, _, _ in self._sums):
            found = {
                (operator, number): [
                    Piece(device, value, box, frozenset({(operator, number, rest)}))
                    for (device, box, rest), value in sums.items()
                ]
                for (tensor, operator, number), sums in self._sums.items()
                if tensor == name
            }
            needs = [
                (device, box) for (tensor, device), boxes in self._stored.items() if tensor == name for box in boxes
            ]
            moves = self._moved(f"d {name}", name, found, needs)
            for move in moves:
                self._take(move)
            for need, value in self._total(moves, needs).items():
                self._reduced[name, need] = self._added(self._reduced.get((name, need)), value, need[0])
        self._sums.clear()

    def _moved(self, name: str, tensor: str, found: _Contributions, needs: Sequence[Need]) -> list[Move]:
        """Move parts of a gradient. Those of operators that are cut alike are added first, and moved once, as
        are those of devices that have one each."""
        alike = dict[object, list[list[Piece]]]()
        for pieces in found.values():
            terms = list(dict.fromkeys(piece.terms for piece in pieces))
            alike.setdefault(tuple((p.device, p.box, terms.index(p.terms)) for p in pieces), []).append(pieces)
        sums, adds = list[list[Piece]](), list[tuple[int, Action]]()
        for group in alike.values():
            added = group[0]
            for others in group[1:]:
                values = [self._mover.new(name) for _ in added]
                adds += [
                    (a.device, Add((a.value, b.value), value))
                    for a, b, value in zip(added, others, values, strict=True)
                ]
                added = [
                    Piece(a.device, value, a.box, a.terms | b.terms)
                    for a, b, value in zip(added, others, values, strict=True)
                ]
            sums.append(added)
        shape, together = self._model.shapes[tensor], [piece for added in sums for piece in added]
        if as_layout(shape, [(piece.device, piece.box, piece.terms) for piece in together]) is not None:
            sums = [together]
        moves = [self._mover.move(name, shape, added, needs) for added in sums]
        for move in moves[:1]:
            move.gives[:0] = adds
        return moves

    def _total(self, moves: Sequence[Move], needs: Sequence[Need]) -> dict[Need, str]:
        total = dict[Need, str]()
        for device, box in dict.fromkeys(needs):
            values = tuple(move.values[device, box] for move in moves)
            total[device, box] = values[0]
            if len(values) > 1:
                total[device, box] = self._mover.new("sum")
                self._rows[device].append(Add(values, total[device, box]))
        return total


def _even_parts(box: Box, number: int) -> list[Box]:
    """Cut a box along its first axis that ``number`` divides, else as evenly as can be; what is too small stays whole."""
    sides = lengths(box)
    axes = [axis for axis, side in enumerate(sides) if side % number == 0]
    axes += [axis for axis, side in enumerate(sides) if side > number]
    if not axes:
        return [box]
    axis, (first, end) = axes[0], box[axes[0]]
    edges = [first + (end - first) * place // number for place in range(number + 1)]
    return [(*box[:axis], side, *box[axis + 1 :]) for side in pairwise(edges)]


def _with_drops(actions: Sequence[Action], kept: set[str]) -> list[Action]:
    """Return the actions, with each value dropped once nothing reads it any more."""
    last = {name: place for place, action in enumerate(actions) for name in (*reads(action), *writes(action))}
    done = list[Action]()
    for place, action in enumerate(actions):
        done.append(action)
        over = tuple(dict.fromkeys(n for n in (*reads(action), *writes(action)) if last[n] == place and n not in kept))
        if over:
            done.append(Drop(over))
    return done
