"""Work that repeats: some micro-batches of each block, one period after the other, and the timetable of any number."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pipeline.schedule.blocks import Block, Dependency, Placement
from pipeline.schedule.play import play
from pipeline.schedule.timetable import Step, Timetable


def unrolled(placement: Placement, num: int) -> Placement:
    """Return the placement of ``num`` micro-batches in a row as one. Micro-batches pass each block in order."""
    if num == 1:
        return placement
    blocks = [
        Block(copied(block.name, copy), block.span, block.memory, block.devices)
        for copy in range(num)
        for block in placement.blocks
    ]
    waits = [
        Dependency(copied(each.before, (copy - each.distance) % num), copied(each.after, copy), distance)
        for copy in range(num)
        for each in placement.dependencies
        for distance in [-((copy - each.distance) // num)]
    ]
    in_turn = [
        Dependency(copied(block.name, copy), copied(block.name, (copy + 1) % num), int(copy + 1 == num))
        for block in placement.blocks
        for copy in range(num)
    ]
    return Placement(placement.name, placement.num_devices, tuple(blocks), tuple(waits + in_turn))


def copied(name: str, copy: int) -> str:
    """Return the name of a block of micro-batch ``copy`` among those that are unrolled."""
    return f"{name}#{copy}"


@dataclass(frozen=True)
class Repetend:
    """Starts within the first of endless repetitions. Repetition ``r`` runs each block ``r * period`` later."""

    placement: Placement
    unroll: int
    """Micro-batches in a repetition."""
    period: int
    """From one repetition to the next."""
    starts: Mapping[Step, int]
    """Of each block of the first ``unroll`` micro-batches; the earliest is 0."""

    @property
    def latency(self) -> int:
        """From the first start to the last end of one repetition's micro-batches."""
        return max(start + self.placement.by_name[step.block].span for step, start in self.starts.items())

    def timetable(self, num_micro_batches: int) -> Timetable:
        """Return the timetable of so many micro-batches: each device's order is that of the repetitions, and each step
        starts as soon as that order allows."""
        starts = {
            Step(step.block, step.micro_batch + first): start + first // self.unroll * self.period
            for first in range(0, num_micro_batches, self.unroll)
            for step, start in self.starts.items()
            if step.micro_batch + first < num_micro_batches
        }
        return play(self.placement, Timetable(self.placement, num_micro_batches, starts).orders)
