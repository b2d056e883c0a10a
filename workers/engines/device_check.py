"""Runs a small model repeatedly on each device, to find one that computes wrongly.

Attention, a gated layer and a loss over a vocabulary, forward and backward, on fixed numbers. The
passes on a device must agree bit for bit; the first is compared with float64 on the CPU. Standard
output ends with a line of JSON (``pipeline.preflight.engine_reports``)."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable

import msgspec
import torch

from pipeline.preflight.engine_reports import CheckedDevice
from pipeline.process.exit_codes import ExitCode

NUM_PASSES = 12
_WIDTH, _LENGTH, _WORDS = 256, 96, 512

Result = list[torch.Tensor]


def numbers() -> Result:
    draw = torch.Generator().manual_seed(20_25)
    shapes = [(_LENGTH, _WIDTH), *[(_WIDTH, _WIDTH)] * 5, (_WORDS, _WIDTH)]
    return [torch.randn(shape, generator=draw, dtype=torch.float64) / math.sqrt(_WIDTH) for shape in shapes]


def one_pass(given: Result) -> Result:
    """Return the loss and its gradients for all inputs."""
    leaves = [one.detach().clone().requires_grad_() for one in given]
    x, query, key, value, gate, up, head = leaves
    scores = (x @ query) @ (x @ key).T / math.sqrt(_WIDTH)
    mixed = scores.softmax(-1) @ (x @ value) + x
    hidden = torch.nn.functional.silu(mixed @ gate) * (mixed @ up) + mixed
    loss = -(hidden @ head.T).log_softmax(-1).diagonal().mean()
    return [loss.detach(), *torch.autograd.grad(loss, leaves)]


def check(device: str, *, passes: Callable[[Result], Result] = one_pass, num_passes: int = NUM_PASSES) -> CheckedDevice:
    exact = one_pass(numbers())
    given = [one.to(torch.float32).to(device) for one in numbers()]
    first = [one.cpu() for one in passes(given)]
    num_unlike, error = 0, _error(first, exact)
    for _ in range(num_passes - 1):
        again = [one.cpu() for one in passes(given)]
        if not all(
            torch.equal(one.view(torch.int32), other.view(torch.int32)) for one, other in zip(again, first, strict=True)
        ):
            num_unlike += 1
            error = max(error, _error(again, exact))
    return CheckedDevice(device=device, num_passes=num_passes, num_unlike=num_unlike, error=error)


def _error(found: Result, exact: Result) -> float:
    worst = max(float((one.double() - other).norm() / other.norm()) for one, other in zip(found, exact, strict=True))
    # JSON has no infinity or NaN
    return worst if math.isfinite(worst) else 1e9


def main() -> ExitCode:
    names = ["cpu", *(f"cuda:{number}" for number in range(torch.cuda.device_count()))]
    sys.stdout.write(msgspec.json.encode([check(name) for name in names]).decode() + "\n")
    return ExitCode.OK
