"""A model as operators on named tensors, and how each may be cut.

An operator's rule names the dimensions of its inputs and of its output, as ``"b s k+, k+ n -> b s n"``:

    b    may be cut: each part computes its part of the output
    k+   may be cut: each part computes a part of a sum, which is the output
    h^   stays whole

So a shard of an operator is a range of each of its dimensions. An input without a dimension that is cut is needed by all
parts, and each of them computes a part of the sum that is its gradient."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cached_property, lru_cache
from typing import Final

import msgspec

from pipeline.plan.layouts.boxes import Box, whole
from protocol.errors import ConfigError

_DIMENSION: Final = re.compile(r"([a-z]+)([+^]?)")


class Rule(msgspec.Struct, frozen=True, dict=True):
    """The dimensions of an operator, read from text by :func:`read_rule`."""

    inputs: tuple[tuple[str, ...], ...]
    output: tuple[str, ...]
    whole: frozenset[str]
    """Those that must not be cut."""

    @cached_property
    def dimensions(self) -> tuple[str, ...]:
        """All dimensions, in the order in which they are written. A shard's box has them in this order."""
        return tuple(dict.fromkeys(name for names in (*self.inputs, self.output) for name in names))

    def part(self, names: tuple[str, ...], box: Box) -> Box:
        """Return the part of a tensor with these dimensions that a shard reads or writes."""
        return tuple([box[self._places[name]] for name in names])

    @cached_property
    def _places(self) -> Mapping[str, int]:
        return {name: place for place, name in enumerate(self.dimensions)}

    def rest(self, names: tuple[str, ...], box: Box) -> Box:
        """Return the ranges of all other dimensions: which part of a sum a shard has."""
        return tuple(side for name, side in zip(self.dimensions, box, strict=True) if name not in names)


@lru_cache(maxsize=1024)
def read_rule(text: str) -> Rule:
    """Return the rule that ``text`` says. Raises ConfigError."""
    left, arrow, right = text.partition("->")
    marks = dict[str, str]()

    def read(words: str) -> tuple[str, ...]:
        names = list[str]()
        for word in words.split():
            found = _DIMENSION.fullmatch(word)
            if found is None or marks.setdefault(found[1], found[2]) != found[2]:
                raise ConfigError(
                    f"rule {text!r} says {word!r}; expected letters for a dimension, with + or ^ after it or neither, and the "
                    "same everywhere"
                )
            names.append(found[1])
        return tuple(names)

    if not arrow:
        raise ConfigError(f"rule {text!r} has no ->; expected inputs and an output, as in 'm k+, k+ n -> m n'")
    rule = Rule(
        tuple(map(read, left.split(","))), read(right), frozenset(n for n, mark in marks.items() if mark == "^")
    )
    for name, mark in marks.items():
        if (mark == "+") == (name in rule.output) and mark != "^":
            expected = "no + after what the output has" if mark else "+ or ^ after what the output does not have"
            raise ConfigError(f"rule {text!r}: dimension {name!r}{mark}; expected {expected}")
    return rule


class Operator(msgspec.Struct, frozen=True):
    """One operator of a model.

    Example:
        ``Operator("up.3", "linear", "b s k+, k+ n -> b s n", ("norm.3", "up.3.weight"), "wide.3")``"""

    name: str
    kind: str
    """What it computes, by the name that a runtime knows it by."""
    text: str
    """Its rule."""
    inputs: tuple[str, ...]
    output: str
    backward: bool = True
    """False: no gradient flows through it."""

    @property
    def rule(self) -> Rule:
        return read_rule(self.text)


class Model(msgspec.Struct, frozen=True, dict=True):
    """The operators of one micro-batch, each after those whose output it reads."""

    shapes: dict[str, tuple[int, ...]]
    """Of all tensors."""
    parameters: tuple[str, ...]
    """Trained; the same in all micro-batches."""
    data: tuple[str, ...]
    """Given for each micro-batch, to whoever needs it."""
    operators: tuple[Operator, ...]
    loss: str
    """A tensor without dimensions. Its sum over all micro-batches is what gradients are of."""

    @cached_property
    def by_name(self) -> Mapping[str, Operator]:
        return {each.name: each for each in self.operators}

    @cached_property
    def producers(self) -> Mapping[str, Operator]:
        """By the tensor that they make."""
        return {each.output: each for each in self.operators}

    @cached_property
    def gradients(self) -> Mapping[str, tuple[tuple[Operator, int], ...]]:
        """The operators, each with the number of the input, whose backward passes add up to a tensor's gradient."""
        readers: dict[str, list[tuple[Operator, int]]] = {}
        for operator in self.operators:
            for number, name in enumerate(operator.inputs):
                producer = self.producers.get(name)
                if operator.backward and (name in self.parameters or (producer is not None and producer.backward)):
                    readers.setdefault(name, []).append((operator, number))
        return {name: tuple(row) for name, row in readers.items()}

    def sizes(self, operator: Operator) -> dict[str, int]:
        """Return how long each dimension of an operator is. Raises ConfigError if its tensors disagree."""
        found = dict[str, int]()
        tensors = (*operator.inputs, operator.output)
        for names, tensor in zip((*operator.rule.inputs, operator.rule.output), tensors, strict=True):
            shape = self.shapes[tensor]
            if len(shape) != len(names) or any(found.setdefault(n, k) != k for n, k in zip(names, shape, strict=True)):
                raise ConfigError(
                    f"operator {operator.name!r} reads or writes {tensor!r} {list(shape)} as {' '.join(names) or 'a number'}, "
                    f"with {found} before it; expected equal lengths"
                )
        return found

    @cached_property
    def boxes(self) -> Mapping[str, Box]:
        """Each operator as one shard, by name."""
        sizes = {each.name: self.sizes(each) for each in self.operators}
        return {each.name: whole([sizes[each.name][name] for name in each.rule.dimensions]) for each in self.operators}

    def check(self) -> Model:
        """Return itself. Raises ConfigError for operators that do not make a model."""
        there = {*self.parameters, *self.data}
        for operator in self.operators:
            if len(operator.inputs) != len(operator.rule.inputs):
                raise ConfigError(
                    f"operator {operator.name!r} has {len(operator.inputs)} inputs and its rule {operator.text!r} "
                    f"{len(operator.rule.inputs)}; expected equal numbers"
                )
            if missing := [name for name in (*operator.inputs, operator.output) if name not in self.shapes]:
                raise ConfigError(
                    f"operator {operator.name!r}: {missing[0]!r} has no shape; expected one of every tensor"
                )
            if early := [name for name in operator.inputs if name not in there]:
                raise ConfigError(f"operator {operator.name!r} reads {early[0]!r}, which nothing before it makes")
            if operator.output in there:
                raise ConfigError(f"operator {operator.name!r} makes {operator.output!r}, which is there already")
            there.add(operator.output)
            assert self.sizes(operator)
        if self.shapes.get(self.loss) != () or self.loss not in self.producers:
            raise ConfigError(f"the loss is {self.loss!r}; expected the output of an operator, without dimensions")
        for operator in self.operators:
            if operator.backward and operator.output != self.loss and operator.output not in self.gradients:
                raise ConfigError(
                    f"operator {operator.name!r} has a backward pass, but no gradient comes to {operator.output!r}; set "
                    "backward to false"
                )
        return self
