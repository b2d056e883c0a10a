"""``python -m tests.workers.engines.training.programmed NUM_RANKS FIRST NUMBER``: random plans on real processes.

Rank 0 draws each plan, checks it and passes its program on. Each rank compares what it has with one process that computes
everything, which it does itself. The exit code is 0 if all agree."""

from __future__ import annotations

import os
import random
import sys

import msgspec
import torch
import torch.distributed as dist

from pipeline.plan.layouts.boxes import Box
from pipeline.plan.programs.actions import Given, Program
from pipeline.plan.programs.check import check_program
from pipeline.plan.programs.operators import Model
from tests.pipeline.plan.programs.plans import VOCABULARY, draw
from workers.engines.training.ranks.group import Group, join
from workers.engines.training.ranks.launch import enter_rank, is_rank, launch
from workers.engines.training.ranks.program import Function, ProgramRunner, Ranges

RELATIVE = 1e-5
_TOTAL = 100.0
"""What the loss is divided by."""


def _embed(ranges: Ranges, tokens: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    first, end = ranges["v"]
    own = (tokens >= first) & (tokens < end)
    return table[(tokens - first).clamp(0, end - first - 1)] * own.unsqueeze(-1)


def _norm(_: Ranges, states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return states * torch.rsqrt(states.square().mean(-1, keepdim=True) + 1e-5) * weight


def _attention(_: Ranges, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    query, key, value = (each.transpose(1, 2) for each in (query, key, value))
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2)


def _loss(_: Ranges, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / _TOTAL


FUNCTIONS: dict[str, Function] = {
    "embed": _embed,
    "norm": _norm,
    "attention": _attention,
    "loss": _loss,
    "add": lambda _, a, b: a + b,
    "linear": lambda _, states, weight: states @ weight,
    "gelu": lambda _, states, weight: torch.nn.functional.gelu(states @ weight),
    "linear3": lambda _, states, weight: torch.einsum("bsk,khw->bshw", states, weight),
    "out": lambda _, states, weight: torch.einsum("bshw,hwk->bsk", states, weight),
    "head": lambda _, states, weight: states @ weight.T,
}


class Truth:
    """What one process computes."""

    def __init__(self, model: Model, num_micro_batches: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.whole = {
            name: (
                torch.randn(model.shapes[name], generator=generator) * 0.3 + (0.7 if "norm" in name else 0.0)
            ).requires_grad_()
            for name in model.parameters
        }
        self.data = [
            {name: torch.randint(0, VOCABULARY, model.shapes[name], generator=generator) for name in model.data}
            for _ in range(num_micro_batches)
        ]
        self.loss = torch.zeros(())
        for micro in self.data:
            values = dict(self.whole) | micro
            for operator in model.operators:
                rule = operator.rule
                ranges = dict(zip(rule.dimensions, model.boxes[operator.name], strict=True))
                made = FUNCTIONS[operator.kind](ranges, *(values[name] for name in operator.inputs))
                values[operator.output] = made if operator.backward else made.detach()
            values[model.loss].backward()
            self.loss += values[model.loss].detach()

    def given(self, each: Given) -> torch.Tensor:
        tensor = self.whole[each.tensor].detach() if each.micro_batch < 0 else self.data[each.micro_batch][each.tensor]
        return part(tensor, each.box).clone()


def part(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    return tensor[tuple(slice(*side) for side in box)]


def check(runner: ProgramRunner, group: Group, seed: int) -> None:
    """Compare loss and gradients of a random plan with those of one process."""
    told, words = None, ""
    if group.is_lead:
        drawn = draw(random.Random(seed), group.size)
        check_program(drawn.model, drawn.program)
        told, words = msgspec.json.encode((drawn.model, drawn.program)), drawn.words
    model, program = msgspec.json.decode(group.broadcast_bytes(told).tobytes(), type=tuple[Model, Program])
    truth = Truth(model, program.num_micro_batches)
    found = runner.run(model, program, truth.given)
    if found.loss is not None:
        assert abs(found.loss - truth.loss) <= RELATIVE * abs(truth.loss), (seed, words, found.loss, truth.loss)
    assert found.gradients
    for (name, box), gradient in found.gradients.items():
        whole = truth.whole[name].grad
        assert whole is not None, name
        expected = part(whole, box)
        wrong = float((gradient - expected).norm() / whole.norm())
        assert wrong <= RELATIVE, f"plan {seed} {words}: {name} {box}: {wrong:.1e}"


def main() -> int:
    if not is_rank():
        command = [sys.executable, "-m", "tests.workers.engines.training.programmed", *sys.argv[2:]]
        return launch(command, int(sys.argv[1]), name="programmed")
    enter_rank()
    torch.set_num_threads(1)
    group = join("cpu", timeout_s=60.0)
    first, number = map(int, sys.argv[1:])
    runner = ProgramRunner(FUNCTIONS, group)
    for seed in range(first, first + number):
        check(runner, group, seed)
    dist.barrier()
    return 0


if __name__ == "__main__":
    ended = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(ended)
