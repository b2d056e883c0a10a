"""Plays the orders of devices: each runs the next block of its own order as soon as it can."""

from __future__ import annotations

from collections import Counter, deque

from pipeline.schedule.blocks import Placement
from pipeline.schedule.timetable import Orders, Step, Timetable
from protocol.errors import ConfigError


def play(placement: Placement, orders: Orders) -> Timetable:
    """Return when each step starts. Raises ConfigError if the devices wait for one another forever."""
    waits: dict[str, list[tuple[str, int]]] = {block.name: [] for block in placement.blocks}
    followers: dict[str, list[tuple[str, int]]] = {block.name: [] for block in placement.blocks}
    for each in placement.dependencies:
        waits[each.after].append((each.before, each.distance))
        followers[each.before].append((each.after, each.distance))
    next_place = [0] * placement.num_devices
    free_at = [0] * placement.num_devices
    starts, ends = dict[Step, int](), dict[Step, int]()

    def heads(devices: tuple[int, ...]) -> list[Step | None]:
        return [orders[d][next_place[d]] if next_place[d] < len(orders[d]) else None for d in devices]

    def ready_at(step: Step) -> int | None:
        """When a step can start; None if a device is not there yet, or a step that it waits for has not run."""
        devices = placement.by_name[step.block].devices
        if any(head != step for head in heads(devices)):
            return None
        at = max(free_at[device] for device in devices)
        for before, distance in waits[step.block]:
            if step.micro_batch >= distance:
                end = ends.get(Step(before, step.micro_batch - distance))
                if end is None:
                    return None
                at = max(at, end)
        return at

    candidates = deque(head for head in heads(tuple(range(placement.num_devices))) if head)
    while candidates:
        step = candidates.popleft()
        at = None if step in starts else ready_at(step)
        if at is None:
            continue
        block = placement.by_name[step.block]
        starts[step], ends[step] = at, at + block.span
        for device in block.devices:
            free_at[device], next_place[device] = at + block.span, next_place[device] + 1
        candidates += [head for head in heads(block.devices) if head]
        candidates += [Step(name, step.micro_batch + distance) for name, distance in followers[step.block]]
    if stuck := [f"device {d} at {head}" for d, head in enumerate(heads(tuple(range(placement.num_devices)))) if head]:
        raise ConfigError(f"{placement.name}: with this order the devices wait for one another: {', '.join(stuck)}")
    num = Counter(step.block for step in starts)
    return Timetable(placement, max(num.values(), default=0), starts)
