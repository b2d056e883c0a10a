"""A small transformer as operators, and random legal plans of it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial

from pipeline.plan.programs.actions import Program
from pipeline.plan.programs.operators import Model, Operator
from pipeline.plan.programs.placing import Placed, Stage, place
from pipeline.plan.programs.preserve import Zero, preserve
from pipeline.plan.programs.split import Split, transform
from pipeline.schedule.baselines import known_orders
from pipeline.schedule.blocks import Block, Placement, chain
from pipeline.schedule.search import search
from pipeline.schedule.shapes import shape
from pipeline.schedule.timetable import Orders
from protocol.errors import ConfigError

B, S, K, H, W, F, VOCABULARY, LAYERS = 4, 6, 8, 4, 2, 12, 10, 4

ALONE = chain("one", 1, (Block("f0", 1, 1), Block("b0", 1, -1)))
"""One block on one group of devices."""


def transformer(*, layers: int = LAYERS, recycles: int = 0, tied: bool = False) -> Model:
    """Return a transformer. With ``recycles`` its output goes through it again, as AlphaFold 2 is trained: only the last
    pass has gradients."""
    shapes: dict[str, tuple[int, ...]] = {
        "tokens": (B, S),
        "targets": (B, S),
        "table": (VOCABULARY, K),
        "last.weight": (K,),
    }
    shapes |= {"head.weight": (VOCABULARY, K)} if not tied else {}
    per_layer = {
        "norm": (K,),
        "q": (K, H, W),
        "k": (K, H, W),
        "v": (K, H, W),
        "out": (H, W, K),
        "norm2": (K,),
        "up": (K, F),
        "down": (F, K),
    }
    for layer in range(layers):
        shapes |= {f"{name}.{layer}.weight": size for name, size in per_layer.items()}
    parameters = tuple(name for name in shapes if name not in ("tokens", "targets"))
    operators = list[Operator]()
    before, prefix, trained = "", "", True

    def add(name: str, kind: str, rule: str, *inputs: str, size: tuple[int, ...]) -> str:
        output = f"{prefix}{name}"
        operators.append(Operator(output, kind, rule, inputs, f"{output}.out", trained))
        shapes[f"{output}.out"] = size
        return f"{output}.out"

    for number in range(recycles + 1):
        trained = number == recycles
        prefix = "" if trained else f"recycle{number + 1}."
        states = add("embed", "embed", "b s, v+ k -> b s k", "tokens", "table", size=(B, S, K))
        if before:
            states = add("mix", "add", "b s k, b s k -> b s k", states, before, size=(B, S, K))
        for i in range(layers):
            weight = partial("{0}.{1}.weight".format)
            normed = add(f"norm.{i}", "norm", "b s k^, k^ -> b s k^", states, weight("norm", i), size=(B, S, K))
            heads = [
                add(f"{n}.{i}", "linear3", "b s k+, k+ h w -> b s h w", normed, weight(n, i), size=(B, S, H, W))
                for n in "qkv"
            ]
            mixed = add(
                f"attend.{i}", "attention", "b s^ h w^, b s^ h w^, b s^ h w^ -> b s^ h w^", *heads, size=(B, S, H, W)
            )
            out = add(f"out.{i}", "out", "b s h+ w+, h+ w+ k -> b s k", mixed, weight("out", i), size=(B, S, K))
            states = add(f"add.{i}", "add", "b s k, b s k -> b s k", states, out, size=(B, S, K))
            normed = add(f"norm2.{i}", "norm", "b s k^, k^ -> b s k^", states, weight("norm2", i), size=(B, S, K))
            wide = add(f"up.{i}", "gelu", "b s k^, k^ f -> b s f", normed, weight("up", i), size=(B, S, F))
            down = add(f"down.{i}", "linear", "b s f+, f+ k -> b s k", wide, weight("down", i), size=(B, S, K))
            states = add(f"add2.{i}", "add", "b s k, b s k -> b s k", states, down, size=(B, S, K))
        before = states
    states = add("last", "norm", "b s k^, k^ -> b s k^", before, "last.weight", size=(B, S, K))
    logits = add(
        "head", "head", "b s k+, v k+ -> b s v", states, "table" if tied else "head.weight", size=(B, S, VOCABULARY)
    )
    loss = add("loss", "loss", "b+ s+ v^, b+ s+ ->", logits, "targets", size=())
    return Model(shapes, parameters, ("tokens", "targets"), tuple(operators), loss).check()


@dataclass(frozen=True)
class Drawn:
    """A random legal plan."""

    words: str
    model: Model
    placed: Placed
    zero: Zero

    @cached_property
    def program(self) -> Program:
        return preserve(self.placed, self.zero)


def draw(rng: random.Random, devices: int) -> Drawn:
    """Return a random plan on 2 or 4 devices: data, tensor, sequence and pipeline splits, copies, co-shards, recomputation,
    embeddings over all devices, parameters stored in parts, and the orders that their shapes have."""
    while True:
        try:
            return _draw(rng, devices)
        except ConfigError as error:
            # an order that cannot do so many micro-batches
            if "micro-batches" not in str(error):
                raise


def _draw(rng: random.Random, devices: int) -> Drawn:
    names = ["one", "V", "M", "MLLM", "loop", "wave", "3F1B", "one"]
    name, wild = rng.choice(names), rng.random() < 0.3
    num_groups = (
        1
        if name == "one"
        else rng.choice([n for n in (2, 4) if n <= devices and (n == 2 or name not in ("loop", "wave"))])
    )
    model = transformer(recycles=2 if name == "3F1B" else 0, tied=rng.random() < 0.3)
    order = rng.sample(range(devices), devices) if rng.random() < 0.3 else list(range(devices))
    size = devices // num_groups
    groups = [tuple(order[size * n : size * (n + 1)]) for n in range(num_groups)]
    placement = ALONE if name == "one" else shape(name, num_groups)
    mode = rng.choice(["data", "tensor", "sequence", "copies", "both"])
    splits, stages = dict[str, Split](), dict[str, Stage]()
    owners = _blocks(model, placement)
    recompute = rng.random() < 0.4
    for block, operators in owners.items():
        members = tuple(device for group in placement.by_name[block].devices for device in groups[group])
        kept = rng.choice([1, 1, 2, 3]) if not wild else 1
        for operator in operators:
            splits[operator.name] = _split(rng, model, operator, len(members), "wild" if wild else mode, kept)
        stages[block] = Stage(tuple(operator.name for operator in operators), members, recompute and rng.random() < 0.7)
    micros = rng.choice([1, 2, 3, 4])
    how, orders = _orders(rng, placement, micros)
    placed = place(model, transform(model, splits), stages, placement, orders)
    zeros: list[Zero] = [0, 0, 1, 2, 3, 3]
    zero = rng.choice(zeros)
    words = (
        f"{name} of {num_groups} groups, {'wild' if wild else mode}, {how}, {placed.num_micro_batches} micro-batches, "
        f"ZeRO {zero}"
    )
    return Drawn(words, model, placed, zero)


def _orders(rng: random.Random, placement: Placement, micros: int) -> tuple[str, Orders]:
    orders = known_orders(placement)
    if len(placement.blocks) > 2 and rng.random() < 0.3:
        repetend = search(placement, [4] * placement.num_devices, time_limit_s=2.0).repetend
        if repetend is not None:
            return "found", repetend.timetable(micros).orders
    how = rng.choice([*orders, list(orders)[-1]])
    return how, orders[how](micros)


def _blocks(model: Model, placement: Placement) -> dict[str, list[Operator]]:
    """Deal out the operators to forward blocks, by layer."""
    forward = [name for name in placement.by_name if name.startswith("f") or ".f" in name]
    made: dict[str, list[Operator]] = {name: [] for name in forward}
    for operator in model.operators:
        prefix = operator.name.partition(".")[0] + "." if operator.name.startswith("recycle") else ""
        name = operator.name.removeprefix(prefix)
        stages = [block for block in forward if block.startswith(f"{prefix}f")]
        kind, _, layer = name.partition(".")
        if kind == "embed" and "embed.f" in made:
            block = "embed.f"
        elif kind in ("last", "head", "loss"):
            block = "head.f" if "head.f" in made else stages[-1]
        else:
            block = stages[int(layer or 0) * len(stages) // LAYERS]
        made[block].append(operator)
    return {block: row for block, row in made.items() if row}


def _split(rng: random.Random, model: Model, operator: Operator, devices: int, mode: str, kept: int) -> Split:
    sizes = model.sizes(operator)
    free = [name for name in sizes if name not in operator.rule.whole]
    if mode == "wild":
        return _wild(rng, sizes, free, devices)
    wanted = {
        "data": ["b"],
        "tensor": ["h", "f", "v"],
        "sequence": ["h", "f", "v", "s"],
        "copies": [],
        "both": ["h", "f", "v"],
    }[mode]
    parts = dict[str, int]()
    if mode == "both" and devices == 4:
        parts["b"], devices = 2, 2
    inner = next((name for name in wanted if name in free and sizes[name] >= devices), None)
    copies = devices
    if inner is not None and devices > 1:
        parts[inner], copies = devices, 1
    more = next((name for name in free if name not in parts and sizes[name] >= kept), None)
    if kept > 1 and more is not None:
        return Split({**parts, more: kept}, copies, kept)
    return Split(parts, copies)


def _wild(rng: random.Random, sizes: dict[str, int], free: Sequence[str], devices: int) -> Split:
    """Cut along anything."""
    parts, kept = dict[str, int](), rng.choice([1, 1, 1, 2, 3])
    copies = 1
    for factor in [devices] if rng.random() < 0.5 else [2] * (devices.bit_length() - 1):
        fits = [name for name in free if sizes[name] >= factor * parts.get(name, 1)]
        if fits and rng.random() < 0.8:
            name = rng.choice(fits)
            parts[name] = parts.get(name, 1) * factor
        else:
            copies *= factor
    fits = [name for name in free if name not in parts and sizes[name] >= kept]
    if kept > 1 and fits:
        return Split({**parts, rng.choice(fits): kept}, copies, kept)
    return Split(parts, copies)
