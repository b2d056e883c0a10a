"""``python -m tests.workers.engines.training.counted NUM_RANKS``: what a learner's ranks send for a gradient, beside what the
programs of their splits say. The exit code is 0 if they agree."""

from __future__ import annotations

import os
import sys
from collections import Counter
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from pipeline.plan.layouts.vectors import Kind
from pipeline.plan.traffic import RankGrid, flows
from pipeline.plan.transformer import Transformer, transformer
from tests.rules import make_rule
from tests.workers.engines.tiny import make_samples, tiny_model
from workers.engines.model.optimizer import OptimizerSettings
from workers.engines.training.policy_gradient import ForwardSettings
from workers.engines.training.ranks.build import Ranks, make_training
from workers.engines.training.ranks.group import Group, join
from workers.engines.training.ranks.launch import enter_rank, is_rank, launch
from workers.engines.training.ranks.messages import Lead

_KINDS = {
    "_allgather_base_": Kind.ALL_GATHER,
    "_reduce_scatter_base_": Kind.REDUCE_SCATTER,
    "all_reduce": Kind.ALL_REDUCE,
}


class Sent(TorchDispatchMode):
    """Counts the bytes that a rank sends, by kind of collective and type of number."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.share, self.bytes = (ranks - 1) / ranks, Counter[tuple[Kind, torch.dtype]]()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kind = _KINDS.get(func.__name__.partition(".")[0]) if func.namespace in ("c10d", "_c10d_functional") else None
        if kind is not None:
            whole = max((each for each in args if isinstance(each, torch.Tensor)), key=torch.Tensor.numel)
            times = 2 if kind is Kind.ALL_REDUCE else 1
            self.bytes[kind, whole.dtype] += int(times * self.share * whole.nbytes)
        return func(*args, **(kwargs or {}))


def sent(group: Group, *, recompute: bool = False) -> tuple[Counter[tuple[Kind, torch.dtype]], Transformer, int]:
    """Return what this rank sends for the gradient of a batch, the model, and the passes."""
    model = tiny_model(tie_word_embeddings=False)
    forward = ForwardSettings(temperature=1.0, micro_batch_tokens=64, autocast=torch.bfloat16)
    ranks = Ranks(group, Lead(group, timeout_s=1e6))
    training = make_training(model, forward, OptimizerSettings(1e-3), ranks, gradient_checkpointing=recompute)
    samples = make_samples(16, with_old=True)
    with Sent(group.size) as counted:
        training._accumulate(samples, make_rule())
    plan = training._plan(samples)
    assert len(plan) > 1
    return counted.bytes, transformer(model.config.to_dict()), len(plan)


def check_stored_in_parts(group: Group, *, recompute: bool) -> None:
    found, model, passes = sent(group, recompute=recompute)
    said = flows(model, RankGrid(group.size, 1, 3), model.layers * recompute)
    expected = {(one.kind, torch.float32): round(4 * passes * one.per_pass) for one in said}
    assert found == expected, (found, expected)


def check_layers_in_parts(group: Group) -> None:
    """All ranks share the layers of one share of the batch."""
    found, model, passes = sent(replace(group, tensor=group.size))
    said = {(one.kind, one.what): one for one in flows(model, RankGrid(1, group.size, 3))}
    gathered = said[Kind.ALL_GATHER, "weights"].per_pass
    assert found[Kind.ALL_GATHER, torch.float32] == round(4 * passes * gathered)
    # forward and backward: as many numbers, in the type of the matrices and in that of the states
    forward, backward = (found[Kind.ALL_REDUCE, dtype] for dtype in (torch.bfloat16, torch.float32))
    tokens = forward / 2 / said[Kind.ALL_REDUCE, "states"].per_token
    assert tokens == int(tokens) > 100
    assert backward / 4 == tokens * said[Kind.ALL_REDUCE, "state gradients"].per_token


def check(group: Group) -> None:
    check_stored_in_parts(group, recompute=False)
    check_stored_in_parts(group, recompute=True)
    check_layers_in_parts(group)


def main() -> int:
    if not is_rank():
        return launch(
            [sys.executable, "-m", "tests.workers.engines.training.counted"], int(sys.argv[1]), name="counted"
        )
    enter_rank()
    torch.set_num_threads(1)
    check(join("cpu", timeout_s=60.0))
    dist.barrier()
    return 0


if __name__ == "__main__":
    ended = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(ended)
