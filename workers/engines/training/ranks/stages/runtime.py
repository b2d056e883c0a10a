"""Runs an order on torch's pipeline runtime: the one file that knows its private names.

The runtime (``torch.distributed.pipelining``) takes a table of actions such as ``0F3`` or ``2B1``: stage, what is
computed, micro-batch. It adds the sends and receives, and does both passes. All micro-batches of a step have one shape
there, so shorter rows are padded between stages, and cut again inside one."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import torch

from pipeline.preflight.packages import check_pipeline_torch
from pipeline.schedule.timetable import Orders
from protocol.errors import ConfigError, EngineError

_BLOCK = re.compile(r"([fbiw])(\d+)")
_LETTERS: Final = {"f": "F", "b": "B", "i": "I", "w": "W"}

Compute = Callable[[int, torch.Tensor | None, int], torch.Tensor]
"""Runs a stage, by number, on the states [N, hidden] of the stage before it, for the micro-batch of a number. The last
stage returns the loss."""


def actions_of(orders: Orders) -> list[list[str]]:
    """Return each rank's actions. Raises ConfigError for a block that is no pass of a stage."""
    rows: list[list[str]] = []
    for order in orders:
        row: list[str] = []
        for step in order:
            found = _BLOCK.fullmatch(step.block)
            if found is None:
                raise ConfigError(
                    f"block {step.block!r} is no pass of a stage; expected f0 and b0 or, split, i0 and w0, and so on"
                )
            row.append(f"{found[2]}{_LETTERS[found[1]]}{step.micro_batch}")
        rows.append(row)
    return rows


def run_actions(
    actions: Sequence[Sequence[str]],
    modules: Mapping[int, torch.nn.Module],
    compute: Compute,
    *,
    num_stages: int,
    lengths: Sequence[int],
    width: int,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Carry out ``actions``, one row a rank, with all ranks; gradients are added to the parameters' ``grad``.

    ``modules`` are this rank's stages by number, ``lengths`` the tokens of each micro-batch."""
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import _Action, _PipelineScheduleRuntime

    check_pipeline_torch(torch.__version__)
    number = len(lengths)
    between = torch.empty(max(lengths), width, dtype=dtype, device="meta", requires_grad=True)
    nothing = torch.empty(1, 1, device="meta")
    loss = torch.empty((), dtype=dtype, device="meta", requires_grad=True)
    stages: list[Any] = [
        PipelineStage(
            _Padded(module, partial(compute, index), lengths, is_first=not index, is_last=index == num_stages - 1),
            index,
            num_stages,
            device,
            input_args=between if index else nothing,
            output_args=between if index < num_stages - 1 else loss,
        )
        for index, module in sorted(modules.items())
    ]
    # torch's runtime numbers losses in the order of the last stage's forward passes
    forward = [action for row in actions for action in row if action.startswith(f"{num_stages - 1}F")]
    if forward != [f"{num_stages - 1}F{micro}" for micro in range(number)]:
        raise EngineError(
            "the last stage's forward passes are not in the order of the micro-batches; choose another order"
        )
    schedule: Any = _PipelineScheduleRuntime(stages, number, loss_fn=lambda loss, _: loss, scale_grads=False)
    schedule._prepare_schedule_with_comms(
        {rank: [_Action.from_str(action) for action in row] for rank, row in enumerate(actions)}
    )
    numbers = torch.arange(number)
    try:
        schedule.step(torch.zeros(number, 1), target=numbers, return_outputs=False, micro_batch=numbers)
    except RuntimeError as error:
        # torch wraps whatever a stage raises
        raise error.__cause__ or error from None


class _Padded(torch.nn.Module):
    """A stage as torch's runtime wants it: tensors of one shape in, and of one shape out."""

    def __init__(
        self,
        module: torch.nn.Module,
        compute: Callable[[torch.Tensor | None, int], torch.Tensor],
        lengths: Sequence[int],
        *,
        is_first: bool,
        is_last: bool,
    ) -> None:
        super().__init__()
        self.module = module
        self._compute, self._lengths = compute, lengths
        self._is_first, self._is_last = is_first, is_last

    def forward(self, states: torch.Tensor, micro_batch: torch.Tensor) -> torch.Tensor:
        number = int(micro_batch)
        length = self._lengths[number]
        made = self._compute(None if self._is_first else states[:length], number)
        if self._is_last:
            return made
        return torch.nn.functional.pad(made, (0, 0, 0, max(self._lengths) - length))
