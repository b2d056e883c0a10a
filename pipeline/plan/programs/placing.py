"""The second phase, space-time scheduling: on which device each shard runs, and in which order.

A *block* is some operators of one micro-batch on some devices, as in ``pipeline.schedule``, whose orders are used: its
forward pass is called ``f0`` or ``embed.f``, its backward pass ``b0`` or ``embed.b``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import msgspec

from pipeline.plan.programs.operators import Model
from pipeline.plan.programs.split import Shard
from pipeline.schedule.blocks import Placement
from pipeline.schedule.play import play
from pipeline.schedule.timetable import Orders, Step
from protocol.errors import ConfigError

_FORWARD = re.compile(r"((?:.*\.)?)f(\d*)")


class Stage(msgspec.Struct, frozen=True):
    """The operators of a block, and where they run."""

    operators: tuple[str, ...]
    devices: tuple[int, ...]
    """In the order of the shards' slots."""
    recompute: bool = False
    """Nothing of the forward pass is kept but what came from other blocks; the backward pass computes it again."""


@dataclass(frozen=True)
class Placed:
    """A model's shards on devices, and all passes in one order that each device follows."""

    model: Model
    shards: Mapping[str, tuple[Shard, ...]]
    stages: Mapping[str, Stage]
    """By the name of the forward block."""
    steps: tuple[Step, ...]
    """Each after those whose results it needs."""
    num_devices: int

    @cached_property
    def stage_of(self) -> Mapping[str, str]:
        """The forward block of each operator."""
        return {name: block for block, stage in self.stages.items() for name in stage.operators}

    @cached_property
    def num_micro_batches(self) -> int:
        return 1 + max(step.micro_batch for step in self.steps)

    def device(self, shard: Shard) -> int:
        return self.stages[self.stage_of[shard.operator]].devices[shard.slot]


def backward_of(block: str) -> str:
    """Return the name of a block's backward pass."""
    found = _FORWARD.fullmatch(block)
    if found is None:
        raise ConfigError(f"block {block!r} is no forward pass; expected a name such as f0 or embed.f")
    return f"{found[1]}b{found[2]}"


def place(
    model: Model,
    shards: Mapping[str, tuple[Shard, ...]],
    stages: Mapping[str, Stage],
    placement: Placement,
    orders: Orders,
) -> Placed:
    """Return the shards with their devices, in the orders of ``placement``'s devices.

    A device of ``placement`` may be a group of the stages' devices. Raises ConfigError if an operator is in no stage or in
    two, if a stage has more or fewer devices than its operators' shards, or if the orders have no end."""
    seen = [name for stage in stages.values() for name in stage.operators]
    if sorted(seen) != sorted(model.by_name):
        odd = sorted({name for name in seen if seen.count(name) > 1} | set(seen) ^ set(model.by_name))
        raise ConfigError(f"operator {odd[0]!r} is in {seen.count(odd[0])} stages; expected each in one")
    for block, stage in stages.items():
        for name in stage.operators:
            slots = 1 + max(shard.slot for shard in shards[name])
            if slots != len(stage.devices):
                raise ConfigError(
                    f"operator {name!r} is cut for {slots} devices, and stage {block!r} has {len(stage.devices)}; expected "
                    "equal numbers: copy it, or keep more shards on a device"
                )
    timetable = play(placement, orders)
    backward = {backward_of(block) for block, stage in stages.items() if _learns(model, stage)}
    wanted = {*stages, *backward}
    if odd := sorted(wanted ^ set(placement.by_name)):
        raise ConfigError(
            f"block {odd[0]!r} is {'not scheduled' if odd[0] in wanted else 'scheduled, and no stage has it'}; expected "
            f"{', '.join(sorted(wanted))}"
        )
    number = {name: place for place, name in enumerate(placement.blocks[i].name for i in placement.order)}
    steps = sorted(timetable.starts, key=lambda step: (timetable.starts[step], number[step.block], step.micro_batch))
    devices = 1 + max(device for stage in stages.values() for device in stage.devices)
    return Placed(model, shards, stages, tuple(steps), devices)


def _learns(model: Model, stage: Stage) -> bool:
    return any(model.by_name[name].backward for name in stage.operators)
