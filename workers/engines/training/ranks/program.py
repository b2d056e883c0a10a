"""Runs a program of ``pipeline.plan.programs`` on ranks: each does its own list of actions.

Communication is explicit, forward and backward, so torch's autograd only ever sees one shard of one operator. Over gloo
or NCCL; messages are told apart by tags over gloo, and by their order over NCCL."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

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
    kept: dict[tuple[str, int, Box], _Kept] = field(default_factory=dict[Any, Any])
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
        with torch.set_grad_enabled(action.keep):
            output = self._kept(action, inputs) if action.keep else self._computed(action, inputs)
        self.values[action.output] = output.detach()

    def _computed(self, action: Forward, inputs: list[torch.Tensor]) -> torch.Tensor:
        return self.runner.compute(self.model.by_name[action.operator], action.box, inputs)

    def _kept(self, action: Forward, inputs: list[torch.Tensor]) -> torch.Tensor:
        inputs = [each.requires_grad_(each.is_floating_point()) for each in inputs]
        forgotten = {number: _Forgotten(inputs[number]) for number in action.forgotten}
        for number, one in forgotten.items():
            inputs[number] = one.passed(inputs[number].detach())
        edges = [get_gradient_edge(each) if each.requires_grad else None for each in inputs]

        def pack(tensor: torch.Tensor) -> object:
            return next((part for one in forgotten.values() if (part := one.part(tensor)) is not None), tensor)

        def unpack(kept: object) -> torch.Tensor:
            return kept.again() if isinstance(kept, _Part) else cast("torch.Tensor", kept)

        with saved_tensors_hooks(pack, unpack):
            output = self._computed(action, inputs)
        key = action.operator, action.micro_batch, action.box
        self.kept[key] = _Kept(edges, output, tuple(forgotten.values()))
        return output

    def _backward(self, action: Backward) -> None:
        kept = self.kept.pop((action.operator, action.micro_batch, action.box))
        for one, name in zip(kept.forgotten, action.again, strict=True):
            one.come_again(self.values[name])
        wanted = {name: edge for name, edge in zip(action.outputs, kept.edges, strict=True) if name and edge}
        gradient = None if action.gradient is None else self.values[action.gradient]
        self.values |= zip(wanted, torch.autograd.grad(kept.output, list(wanted.values()), gradient), strict=True)


class _Kept(NamedTuple):
    """Of a forward pass, with what autograd keeps between the two."""

    edges: list[GradientEdge | None]
    """Where the gradients of its inputs arrive."""
    output: torch.Tensor
    forgotten: tuple[_Forgotten, ...]


class _Forgotten:
    """An input of which autograd keeps nothing: it only knows where its values were."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._storage, self._first = tensor.untyped_storage().data_ptr(), int(tensor.storage_offset())
        self._sizes, self._strides = tensor.shape, tensor.stride()
        self.value: torch.Tensor | None = None

    def passed(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the input with a gradient of its own, which does not keep it as a leaf's would."""
        return cast("torch.Tensor", _Passed.apply(torch.zeros((), requires_grad=True), tensor))

    def part(self, tensor: torch.Tensor) -> _Part | None:
        """Return where a tensor is in this input, None if elsewhere."""
        if tensor.untyped_storage().data_ptr() != self._storage:
            return None
        return _Part(self, tensor.shape, tensor.stride(), int(tensor.storage_offset()) - self._first)

    def come_again(self, value: torch.Tensor) -> None:
        self.value = torch.empty_strided(self._sizes, self._strides, dtype=value.dtype, device=value.device)
        self.value.copy_(value)


class _Part(NamedTuple):
    of: _Forgotten
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    first: int

    def again(self) -> torch.Tensor:
        assert self.of.value is not None, "a backward pass gets what was forgotten"
        return self.of.value.as_strided(self.sizes, self.strides, self.first)


class _Passed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, None]:
        raise AssertionError("gradients are taken before this")
