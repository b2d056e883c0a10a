"""The orders that people know, written by their published rules, to compare a found order with.

Those of the 1F1B family are a clock: each block has a slot, a micro-batch is two slots later than the one before it, and
a device runs its steps by their slots. Zero-bubble orders count what each device has done so far."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from fractions import Fraction
from functools import partial
from typing import Final

from pipeline.schedule.blocks import Placement
from pipeline.schedule.play import play
from pipeline.schedule.timetable import Orders, Step
from protocol.errors import ConfigError

_STAGE: Final = re.compile(r"([fbiw])(\d+)")
ONE_AT_A_TIME: Final = "one at a time"
_FEW, _MANY = 16, 32
"""Micro-batches a device between which a period is measured."""

Order = Callable[[int], Orders]
"""From a number of micro-batches to the orders of the devices. Raises ConfigError for a number that it cannot do."""


def known_orders(placement: Placement) -> dict[str, Order]:
    """Return the orders for a placement, by name: two for any, and more for those of ``shapes``."""
    by_name = {
        ONE_AT_A_TIME: lambda step, place: (step.micro_batch, place),
        "GPipe": lambda step, place: (place, step.micro_batch),
    }
    orders: dict[str, Order] = {name: partial(_by_key, placement, key) for name, key in by_name.items()}
    shape, n, is_split = placement.name, placement.num_devices, any(b.name == "w0" for b in placement.blocks)
    if not any(block.name in ("b0", "i0") for block in placement.blocks):
        return orders
    if shape == "V":
        orders["1F1B"] = partial(_by_slot, placement, _slots(placement, n))
    elif shape in ("M", "NN", "NN-eager", "MLLM", "finetune"):
        orders["1F1B+"] = partial(_by_slot, placement, _slots(placement, n))
    elif shape == "K":
        orders["1F1B+"] = partial(_by_slot, placement, _slots(placement, n // 2, period=n // 2))
        join = {"join.f": n // 2, "join.b": n // 2 + 1}
        orders["staged 1F1B"] = partial(_by_slot, placement, _slots(placement, n // 2 + 1, period=n // 2) | join)
    elif shape == "X" and n % 2 == 0:
        slots = _slots(placement, n, period=n)
        orders["Chimera direct"] = partial(_by_slot, placement, slots, unit=n // 2)
        orders["Chimera in units"] = partial(_by_slot, placement, slots, unit=n // 2, apart=True)
    elif shape == "loop":
        orders["interleaved 1F1B"] = partial(_each_device, placement, _interleaved)
    if is_split and shape == "V":
        orders["ZB-H1"] = partial(_each_device, placement, _zb_h1)
    if is_split and shape == "wave":
        orders |= {
            "ZB-V": partial(_each_device, placement, _zb_v),
            "DualPipeV": partial(_each_device, placement, _dual_v),
        }
    return orders


def measured_period(placement: Placement, order: Order) -> Fraction:
    """Return how much longer each further micro-batch takes by an order."""
    few, many = _FEW * placement.num_devices, _MANY * placement.num_devices
    return Fraction(play(placement, order(many)).makespan - play(placement, order(few)).makespan, many - few)


# -- orders by a clock -----------------------------------------------------------------------------


def _by_key(placement: Placement, key: Callable[[Step, int], tuple[Fraction | int, ...]], num: int) -> Orders:
    steps = [(Step(placement.blocks[i].name, m), place) for place, i in enumerate(placement.order) for m in range(num)]
    rows: list[list[Step]] = [[] for _ in range(placement.num_devices)]
    for step, _ in sorted(steps, key=lambda each: key(*each)):
        for device in placement.by_name[step.block].devices:
            rows[device].append(step)
    return rows


def _slots(placement: Placement, num_stages: int, *, period: int = 0) -> dict[str, Fraction]:
    """Return each block's slot for micro-batch 0: stage ``s`` forward at ``s``, backward as long before the end of a
    round trip of ``num_stages``. With ``period`` stages are counted anew after so many. A block of all devices is
    half a slot before the stage that waits for it, or after the last one."""
    slots = dict[str, Fraction]()
    for name in placement.by_name:
        if match := _STAGE.fullmatch(name):
            stage = int(match[2]) % period if period else int(match[2])
            slots[name] = Fraction(stage if match[1] == "f" else 2 * num_stages - 1 - stage)
    for place in reversed(placement.order):
        name = placement.blocks[place].name
        if name not in slots:
            next_slots = [slots[each.after] for each in placement.dependencies if each.before == name]
            is_stage = [bool(_STAGE.fullmatch(each.after)) for each in placement.dependencies if each.before == name]
            slots[name] = (
                min(next_slots) - Fraction(any(is_stage), 2) if next_slots else max(slots.values()) + Fraction(1, 2)
            )
    return slots


def _by_slot(
    placement: Placement, slots: Mapping[str, Fraction | int], num: int, *, unit: int = 0, apart: bool = False
) -> Orders:
    """Micro-batches two slots after one another. With ``unit``, so many fill a round trip that is repeated; ``apart``: a
    device ends one before it begins the next."""
    round_trip = (4 if apart else 2) * placement.num_devices

    def key(step: Step, place: int) -> tuple[Fraction | int, ...]:
        start = step.micro_batch // unit * round_trip + step.micro_batch % unit * 2 if unit else 2 * step.micro_batch
        return start + slots[step.block], step.micro_batch, place

    return _by_key(placement, key, num)


# -- orders by counting ----------------------------------------------------------------------------

_Kinds = Iterable[str]
"""What a device does, as blocks without micro-batch; ``f0`` and so on. ``b0`` is ``i0`` and ``w0`` where it is split."""


def _each_device(placement: Placement, rule: Callable[[int, int, int], _Kinds], num: int) -> Orders:
    """Return the orders of a rule that is given device, devices and micro-batches, with micro-batches in turn."""
    rows = []
    for device in range(placement.num_devices):
        count, row = Counter[str](), list[Step]()
        for kind in rule(device, placement.num_devices, num):
            is_whole = kind[0] == "b" and kind not in placement.by_name
            for name in (f"i{kind[1:]}", f"w{kind[1:]}") if is_whole else (kind,):
                row.append(Step(name, count[name]))
                count[name] += 1
        rows.append([step for step in row if step.micro_batch < num])
    return rows


def _interleaved(device: int, n: int, num: int) -> _Kinds:
    """Interleaved 1F1B with two stages a device (Narayanan et al., 2021)."""
    rounds = max(1, num // n)
    if num % rounds:
        raise ConfigError(f"interleaved 1F1B with {num} micro-batches; expected a multiple of {rounds}")
    group = num // rounds
    warm_up = min(group + 2 * (n - 1 - device), 2 * num)
    forward = [f"f{device + n * (place // group % 2)}" for place in range(2 * num)]
    backward = [f"b{device + n * (1 - place // group % 2)}" for place in range(2 * num)]
    yield from forward[:warm_up]
    for first, second in zip(forward[warm_up:], backward, strict=False):
        yield from (first, second)
    yield from backward[2 * num - warm_up :]


def _zb_h1(device: int, n: int, num: int) -> _Kinds:
    """ZB-H1 (Qi et al., 2023): as much memory as 1F1B, gradients for weights delayed by as many as the device's number."""
    f, i, w = f"f{device}", f"i{device}", f"w{device}"
    warm_up = min(n - 1 - device, num)
    yield from [f] * warm_up
    for place in range(num):
        if warm_up + place < num:
            yield f
        yield i
        if place >= device:
            yield w
    yield from [w] * min(device, num)


def _zb_v(device: int, n: int, num: int) -> _Kinds:
    """ZB-V (Qi et al., 2024): two stages a device, in the shape of a V."""
    first, second = device, 2 * n - 1 - device
    f0, f1, b0, b1 = f"f{first}", f"f{second}", f"b{first}", f"b{second}"
    total = max(2 * n - 1, num)
    yield from [f0] * (2 * (n - device) - 1) + [f1, f0] * device + [f1, b1] * (n - device)
    num_f0, num_f1 = 2 * n - 1 - device, n
    num_b0 = 0
    while num_f1 < num_f0 or num_f0 < total:
        if num_f0 < total:
            yield f0
            num_f0 += 1
        yield from (b0, f1, b1)
        num_f1 += 1
        num_b0 += 1
    i0, i1, w0, w1 = f"i{first}", f"i{second}", f"w{first}", f"w{second}"
    yield from [i0, i1] * device + [i0, w0] * (n - device) + [w1] * device + [w0] * device


def _dual_v(device: int, n: int, num: int) -> _Kinds:
    """DualPipeV (DeepSeek, 2025), with a forward and a backward pass that it overlaps one after the other."""
    if num < 2 * n:
        raise ConfigError(f"DualPipeV with {num} micro-batches; expected at least {2 * n}")
    first, second, rest = device, 2 * n - 1 - device, n - 1 - device
    f0, f1, b0, b1 = f"f{first}", f"f{second}", f"b{first}", f"b{second}"
    i0, i1, w0, w1 = f"i{first}", f"i{second}", f"w{first}", f"w{second}"
    yield from [f0] * (2 * rest) + [f0, f1] * (device + 1) + [i1, w1, f1] * rest
    yield from [f0, b1, f1, b0] * (num - 2 * n + device + 1) + [b1, f1, b0] * rest
    # the second half of the last backward passes is split, and its gradients for weights fill the end
    last = [(b1, i1, w1), (b0, i0, w0)] * (device + 1)
    first_split = 2 * ((device + 1) // 2) + (device + 1) % 2
    yield from [whole for whole, _, _ in last[:first_split]] + [part for _, part, _ in last[first_split:]]
    waiting = [weights for _, _, weights in last[first_split:]]
    for _ in range(rest):
        yield from (waiting.pop(0), i0)
        waiting.append(w0)
    yield from waiting
