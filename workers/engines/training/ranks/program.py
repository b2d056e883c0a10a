"""Runs a program of ``pipeline.plan.programs`` on ranks: each does its own list of actions.

Communication is explicit, forward and backward, so torch's autograd only ever sees one shard of one operator. Over gloo
or NCCL; messages are told apart by tags over gloo, and by their order over NCCL."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from pipeline.plan.layouts.boxes import Box
from pipeline.plan.layouts.vectors import Kind
from pipeline.plan.programs.actions import (
    Action,
    Add,
    Backward,
    Collective,
    Cut,
    Divide,
    Drop,
    Forward,
    Given,
    Join,
    Program,
    Receive,
    Send,
)
from pipeline.plan.programs.operators import Model, Operator
from protocol.errors import EngineError
from workers.engines.training.ranks.group import Group

Ranges = Mapping[str, tuple[int, int]]
Function = Callable[..., torch.Tensor]
"""Computes a shard of an operator: from the ranges of its dimensions, by name, and its inputs."""


@dataclass(frozen=True, slots=True)
class Results:
    loss: torch.Tensor | None
    """On the rank that has it; None on all others."""
    gradients: dict[tuple[str, Box], torch.Tensor]
    """Of this rank's parts of parameters."""


class ProgramRunner:
    """Runs any number of programs."""

    def __init__(self, functions: Mapping[str, Function], group: Group, dtype: torch.dtype = torch.float32) -> None:
        """``functions`` computes each kind of operator. All ranks of ``group`` make the same runner."""
        self._functions, self._group, self._dtype = functions, group, dtype
        self._groups: dict[tuple[int, ...], Any] = {tuple(range(group.size)): None}

    def run(self, model: Model, program: Program, given: Callable[[Given], torch.Tensor]) -> Results:
        """Run a program of ``model`` with all ranks; ``given`` returns what this rank has before the first action."""
        if missing := sorted({each.kind for each in model.operators} - self._functions.keys()):
            raise EngineError(
                f"no function computes operators of kind {missing[0]!r}; expected one of {', '.join(self._functions)}"
            )
        if len(program.actions) != self._group.size:
            raise EngineError(
                f"the program is for {len(program.actions)} devices, and there are {self._group.size} ranks; expected a rank "
                "for each device"
            )
        self._make_groups(program)
        rank = self._group.rank
        run = _Run(self, model, {each.value: given(each) for each in program.given[rank]})
        for action in program.actions[rank]:
            run.act(action)
        for sent, _ in run.sent:
            sent.wait()
        device, name = program.loss
        gradients = {(e.tensor, e.box): run.values[e.gradient] for e in program.given[rank] if e.gradient is not None}
        return Results(run.values[name] if device == rank else None, gradients)

    def _make_groups(self, program: Program) -> None:
        """All ranks make all groups, in one order."""
        calls = (action for row in program.actions for action in row if isinstance(action, Collective))
        for devices in sorted({tuple(sorted(call.devices)) for call in calls} - self._groups.keys()):
            self._groups[devices] = dist.new_group(list(devices))

    def compute(self, operator: Operator, box: Box, inputs: list[torch.Tensor]) -> torch.Tensor:
        return self._functions[operator.kind](dict(zip(operator.rule.dimensions, box, strict=True)), *inputs)

    def empty(self, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.empty(shape, dtype=self._dtype, device=self._group.device)

    def exchange(self, call: Collective, value: torch.Tensor) -> torch.Tensor:
        """Take part in a collective. Parts are in the order of its devices, whatever torch's group has."""
        group = self._groups[tuple(sorted(call.devices))]
        places, n = [sorted(call.devices).index(device) for device in call.devices], len(call.devices)
        if call.kind is Kind.ALL_REDUCE:
            total = value.clone()
            dist.all_reduce(total, group=group)
            return total
        if call.kind is Kind.ALL_GATHER:
            told = [torch.empty_like(value) for _ in range(n)]
            dist.all_gather(told, value, group=group)
            return torch.cat([told[place] for place in places], call.axis)
        # gloo has no reduce-scatter, and all-to-all only of one tensor
        given = value.chunk(n, call.axis if call.kind is Kind.REDUCE_SCATTER else call.to_axis)
        by_rank = torch.stack([given[places.index(place)] for place in range(n)])
        told = torch.empty_like(by_rank)
        dist.all_to_all_single(told, by_rank, group=group)
        parts = [told[place] for place in places]
        return torch.stack(parts).sum(0) if call.kind is Kind.REDUCE_SCATTER else torch.cat(parts, call.axis)


@dataclass
class _Run:
    """One run on one rank."""

    runner: ProgramRunner
    model: Model
    values: dict[str, torch.Tensor]
    kept: dict[tuple[str, int, Box], tuple[list[torch.Tensor], torch.Tensor]] = field(default_factory=dict[Any, Any])
    """The inputs and the output of a forward pass, with what autograd keeps between them."""
    sent: list[tuple[Any, torch.Tensor]] = field(default_factory=list[tuple[Any, torch.Tensor]])

    def act(self, action: Action) -> None:
        values = self.values
        match action:
            case Forward():
                self._forward(action)
            case Backward():
                self._backward(action)
            case Cut():
                values[action.output] = values[action.source][tuple(slice(*side) for side in action.box)]
            case Join():
                values[action.output] = torch.cat([values[name] for name in action.sources], action.axis)
            case Add():
                first, *others = (values[name] for name in action.sources)
                values[action.output] = sum(others, first)
            case Divide():
                values[action.output] = values[action.source] / action.by
            case Collective():
                values[action.output] = self.runner.exchange(action, values[action.source].contiguous())
            case Send():
                tensor = values[action.source].contiguous()
                self.sent.append((dist.isend(tensor, action.to, tag=action.tag), tensor))
            case Receive():
                values[action.output] = self.runner.empty(action.shape)
                dist.recv(values[action.output], action.source, tag=action.tag)
            case Drop():
                for name in action.values:
                    del values[name]

    def _forward(self, action: Forward) -> None:
        inputs = [self.values[name].detach() for name in action.inputs]
        if action.keep:
            inputs = [each.requires_grad_(each.is_floating_point()) for each in inputs]
        with torch.set_grad_enabled(action.keep):
            output = self.runner.compute(self.model.by_name[action.operator], action.box, inputs)
        if action.keep:
            self.kept[action.operator, action.micro_batch, action.box] = inputs, output
        self.values[action.output] = output.detach()

    def _backward(self, action: Backward) -> None:
        inputs, output = self.kept.pop((action.operator, action.micro_batch, action.box))
        wanted = [(name, each) for name, each in zip(action.outputs, inputs, strict=True) if name is not None]
        gradient = None if action.gradient is None else self.values[action.gradient]
        made = torch.autograd.grad(output, [each for _, each in wanted], gradient)
        self.values |= {name: each for (name, _), each in zip(wanted, made, strict=True)}
