"""Runs an order whose blocks may be on several ranks at once, over gloo.

Every rank follows its own list of steps. What a step needs from another rank is received before it, what others need
from it is sent after it, and a block of several ranks begins on all of them together. Messages are told apart by tags,
so only the steps are in a fixed order. Torch's pipeline runtime (``runtime``) knows only blocks of one rank."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from pipeline.schedule.blocks import Block, Placement
from pipeline.schedule.timetable import Orders, Step
from protocol.errors import EngineError

_AHEAD = 2
"""Steps whose messages may arrive while an earlier step computes."""


class Work(Protocol):
    def run(self, step: Step, inputs: Mapping[str, torch.Tensor], group: Any) -> torch.Tensor:
        """Compute a step of this rank; return what the blocks after it get.

        ``inputs`` has the results of the blocks that it waits for, by name. ``group`` has the ranks of a block of
        several, None stands for all of them; each of these ranks returns the same tensor."""
        ...

    def empty(self, block: str, micro_batch: int) -> torch.Tensor:
        """Return a tensor of the shape and type of a step's result."""
        ...


@dataclass(frozen=True, slots=True)
class Ran:
    """When a step ran on a rank, on the host's monotonic clock."""

    step: Step
    begin_s: float
    end_s: float


class OrderedExecutor:
    def __init__(self, placement: Placement, orders: Orders, work: Work) -> None:
        """All ranks make it with the same ``placement`` and ``orders``, one rank a device."""
        size = dist.get_world_size()
        if size != placement.num_devices or dist.get_backend() != "gloo":
            raise EngineError(
                f"{placement.name} has {placement.num_devices} devices, but there are {size} ranks over {dist.get_backend()}; "
                "expected a rank for each device, over gloo, which has tags"
            )
        self._placement, self._work, self._rank = placement, work, dist.get_rank()
        self._order = orders[self._rank]
        self._num = 1 + max(step.micro_batch for order in orders for step in order)
        self._groups: dict[tuple[int, ...], Any] = {tuple(range(size)): None}
        for block in placement.blocks:
            # all ranks make all groups, in one order
            if len(block.devices) > 1 and block.devices not in self._groups:
                self._groups[block.devices] = dist.new_group(list(block.devices))
        self._results: dict[Step, torch.Tensor] = {}
        self._readers: dict[Step, int] = {}
        self._receipts: dict[int, tuple[Any, torch.Tensor]] = {}

    def run(self) -> list[Ran]:
        """Run all steps of this rank once; return when each ran."""
        ran: list[Ran] = []
        sent: list[Any] = []
        for place, step in enumerate(self._order):
            for later in self._order[place : place + _AHEAD]:
                self._expect(later)
            inputs = self._inputs(step)
            block = self._placement.by_name[step.block]
            group = self._groups.get(block.devices)
            if len(block.devices) > 1:
                dist.barrier(group)
            begin_s = time.monotonic()
            result = self._work.run(step, inputs, group)
            ran.append(Ran(step, begin_s, time.monotonic()))
            sent += self._pass_on(step, block, result)
        for each in sent:
            each.wait()
        return ran

    def _expect(self, step: Step) -> None:
        for tag, before in self._before(step):
            block = self._placement.by_name[before.block]
            if self._rank not in block.devices and tag not in self._receipts:
                buffer = self._work.empty(*before)
                self._receipts[tag] = (dist.irecv(buffer, block.devices[0], tag=tag), buffer)

    def _inputs(self, step: Step) -> dict[str, torch.Tensor]:
        inputs: dict[str, torch.Tensor] = {}
        for tag, before in self._before(step):
            if tag in self._receipts:
                receipt, inputs[before.block] = self._receipts.pop(tag)
                receipt.wait()
                continue
            inputs[before.block] = self._results[before]
            self._readers[before] -= 1
            if not self._readers[before]:
                del self._results[before]
        return inputs

    def _pass_on(self, step: Step, block: Block, result: torch.Tensor) -> Sequence[Any]:
        sent: list[Any] = []
        readers = 0
        for tag, after in self._after(step):
            devices = self._placement.by_name[after.block].devices
            readers += self._rank in devices
            if self._rank == block.devices[0]:
                sent += [dist.isend(result, device, tag=tag) for device in devices if device not in block.devices]
        if readers:
            self._results[step], self._readers[step] = result, readers
        return sent

    def _before(self, step: Step) -> list[tuple[int, Step]]:
        """Return the steps that a step waits for, each with the tag of its message."""
        return [
            (number * self._num + step.micro_batch, Step(each.before, step.micro_batch - each.distance))
            for number, each in enumerate(self._placement.dependencies)
            if each.after == step.block and step.micro_batch >= each.distance
        ]

    def _after(self, step: Step) -> list[tuple[int, Step]]:
        return [
            (number * self._num + step.micro_batch + each.distance, Step(each.after, step.micro_batch + each.distance))
            for number, each in enumerate(self._placement.dependencies)
            if each.before == step.block and step.micro_batch + each.distance < self._num
        ]
