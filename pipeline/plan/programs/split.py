"""The first phase, transformation: operators are cut into shards, or copied."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import product

import msgspec

from pipeline.plan.layouts.boxes import Box
from pipeline.plan.programs.operators import Model, Operator
from protocol.errors import ConfigError


class Split(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How one operator is cut.

    Example:
        ``Split({"b": 2, "n": 4}, kept=2)`` makes 8 shards, of which the first two are on the first of 4 devices."""

    parts: dict[str, int] = {}
    """Into how many parts each dimension is cut, the last one running fastest."""
    copies: int = 1
    """How often all of them are computed. A copy saves communication, or the split of what cannot be cut."""
    kept: int = 1
    """Shards on one device, computed one after another (co-shard)."""


class Shard(msgspec.Struct, frozen=True):
    """A part of an operator."""

    operator: str
    box: Box
    """The range of each dimension, in the order of the operator's rule."""
    slot: int
    """Number of the device, among those of its operator, on which it is computed."""


def shards_of(model: Model, operator: Operator, split: Split) -> tuple[Shard, ...]:
    """Return the shards of an operator; parts are as even as can be. Raises ConfigError for a cut that is not possible."""
    rule, sizes = operator.rule, model.sizes(operator)
    for name, parts in split.parts.items():
        if name not in sizes or (name in rule.whole and parts > 1):
            free = sorted(set(sizes) - rule.whole)
            raise ConfigError(
                f"operator {operator.name!r} ({operator.text}) is to be cut along {name!r}; expected one of {', '.join(free)}"
            )
        if not 1 <= parts <= sizes[name]:
            raise ConfigError(
                f"operator {operator.name!r}: dimension {name!r} of length {sizes[name]} is to be cut into {parts}; expected 1 "
                f"to {sizes[name]}"
            )
    number = math.prod(split.parts.values())
    if split.copies < 1 or split.kept < 1 or number % split.kept:
        raise ConfigError(
            f"operator {operator.name!r}: {split.copies} copies of {number} shards, {split.kept} on each device; expected at "
            "least one, and a number on each device that divides the shards"
        )
    sides = {name: [(0, size)] for name, size in sizes.items()}
    for name, parts in split.parts.items():
        size = sizes[name]
        sides[name] = [(size * place // parts, size * (place + 1) // parts) for place in range(parts)]
    order = [*split.parts, *(name for name in sizes if name not in split.parts)]
    boxes = list[Box]()
    for combination in product(*(sides[name] for name in order)):
        ranges = dict(zip(order, combination, strict=True))
        boxes.append(tuple(ranges[name] for name in rule.dimensions))
    return tuple(Shard(operator.name, box, place // split.kept) for place, box in enumerate(boxes * split.copies))


def transform(model: Model, splits: Mapping[str, Split]) -> dict[str, tuple[Shard, ...]]:
    """Return the shards of each operator, by its name. Operators without a split are whole."""
    if unknown := sorted(splits.keys() - model.by_name.keys()):
        raise ConfigError(f"there is no operator {unknown[0]!r}; expected one of {', '.join(model.by_name)}")
    return {each.name: shards_of(model, each, splits.get(each.name, Split())) for each in model.operators}
