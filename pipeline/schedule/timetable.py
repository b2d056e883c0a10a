"""When every block of every micro-batch starts, and what follows from it: orders of the devices, makespan, bubble,
memory. ``Timetable.check`` is a judge that knows nothing of how a timetable was found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from pipeline.schedule.blocks import Block, Placement
from protocol.errors import ConfigError


class Step(NamedTuple):
    """A block of one micro-batch; micro-batches are counted from 0."""

    block: str
    micro_batch: int


Orders = Sequence[Sequence[Step]]
"""What each device runs, in order. A block of several devices is in the order of each."""


@dataclass(frozen=True)
class Timetable:
    """Start times of all steps of ``num_micro_batches`` micro-batches."""

    placement: Placement
    num_micro_batches: int
    starts: Mapping[Step, int]

    def block(self, step: Step) -> Block:
        return self.placement.by_name[step.block]

    def end(self, step: Step) -> int:
        return self.starts[step] + self.block(step).span

    @cached_property
    def orders(self) -> tuple[tuple[Step, ...], ...]:
        rows: list[list[Step]] = [[] for _ in range(self.placement.num_devices)]
        for step in sorted(self.starts, key=lambda step: self.starts[step]):
            for device in self.block(step).devices:
                rows[device].append(step)
        return tuple(map(tuple, rows))

    @cached_property
    def makespan(self) -> int:
        return max(map(self.end, self.starts)) - min(self.starts.values())

    @cached_property
    def bubble(self) -> float:
        """Share of the devices' time, over the makespan, in which they wait."""
        busy = sum(block.span * len(block.devices) for block in self.placement.blocks) * self.num_micro_batches
        return 1 - busy / (self.makespan * self.placement.num_devices)

    @cached_property
    def peaks(self) -> tuple[int, ...]:
        """The most memory held at once, by device."""
        return tuple(max(held, default=0) for held in self.held)

    @cached_property
    def held(self) -> tuple[tuple[int, ...], ...]:
        """Memory while each step runs, by device: what a step gives back is still held while it runs."""
        rows = []
        for order in self.orders:
            held, row = 0, []
            for step in order:
                change = self.block(step).memory
                row.append(held + max(change, 0))
                held += change
            rows.append(tuple(row))
        return tuple(rows)

    def check(self, memory: Sequence[int] | None = None) -> None:
        """Raise ConfigError for the first rule that it breaks: every step once, each after those that it waits for, one
        at a time on a device, never less than nothing held, never more than ``memory`` (by device)."""
        wanted = {Step(block.name, m) for block in self.placement.blocks for m in range(self.num_micro_batches)}
        if wanted != set(self.starts):
            odd = min(wanted ^ set(self.starts))
            raise ConfigError(f"step {odd} is {'missing' if odd in wanted else 'not of this placement'}")
        for each in self.placement.dependencies:
            for m in range(each.distance, self.num_micro_batches):
                before, after = Step(each.before, m - each.distance), Step(each.after, m)
                if self.starts[after] < self.end(before):
                    raise ConfigError(
                        f"{after} starts at {self.starts[after]}, before {before} ends at {self.end(before)}"
                    )
        for device, (order, held) in enumerate(zip(self.orders, self.held, strict=True)):
            for first, second in pairwise(order):
                if self.starts[second] < self.end(first):
                    raise ConfigError(f"device {device} runs {first} and {second} at once at {self.starts[second]}")
            for step, most in zip(order, held, strict=True):
                if memory is not None and most > memory[device]:
                    raise ConfigError(
                        f"device {device} holds {most} at {step}, starting at {self.starts[step]}; expected at most "
                        f"{memory[device]}"
                    )
                if most + min(self.block(step).memory, 0) < 0:
                    raise ConfigError(f"device {device} has given back more than it held after {step}")
