"""``python -m tests.workers.engines.training.staged NUM_RANKS``: what a pipeline computes, on real processes.

Each rank compares what it has with one process that computes everything, which it does itself. The exit code is 0 if
all agree."""

from __future__ import annotations

import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from pipeline.algorithms.batching import plan_micro_batches
from pipeline.algorithms.prefixes import SharedPrefixes
from pipeline.schedule.plan import make_plan
from pipeline.schedule.search import search
from pipeline.schedule.shapes import Costs, shape
from pipeline.schedule.stages import stage_orders
from tests.rules import make_rule
from tests.workers.engines.tiny import VOCABULARY, make_samples, tiny_model
from workers.engines.model.optimizer import OptimizerSettings
from workers.engines.model.packed import prepare_packed
from workers.engines.training.policy_gradient import ForwardSettings, PackedPolicy, accumulate_gradient, batch_totals
from workers.engines.training.ranks.backend import RankedTraining
from workers.engines.training.ranks.build import Ranks, make_training
from workers.engines.training.ranks.group import Group, join
from workers.engines.training.ranks.launch import enter_rank, is_rank, launch
from workers.engines.training.ranks.messages import Lead
from workers.engines.training.ranks.stages.backend import PipelinedTraining, StagePlan

RELATIVE = 1e-5
FORWARD = ForwardSettings(temperature=0.8, micro_batch_tokens=64)
RULE = make_rule(kl_coefficient=0.1, entropy_coefficient=0.01)


def check_gradients(
    group: Group,
    schedule: str | Path,
    *,
    stages: int = 0,
    micro_batches: int = 6,
    forward: ForwardSettings = FORWARD,
    **changes: Any,
) -> None:
    """Compare loss, metrics and gradients of a pipeline with those of one process."""
    found = stage_orders(schedule, group.size, stages)
    plan = StagePlan(found.ranks, micro_batches, found.orders)
    samples = make_samples(17, with_old=True)
    changes = {"num_hidden_layers": 4, "seed": 1} | changes
    alone = prepare_packed(tiny_model(**changes))
    micros = plan_micro_batches(SharedPrefixes.of([sample.tokens for sample in samples]), 512)
    sums = accumulate_gradient(PackedPolicy(alone, FORWARD), samples, RULE, micros, torch.device("cpu"))
    truth = batch_totals(samples, RULE, sums)

    ranks = Ranks(group, Lead(group, timeout_s=1e6))
    training = make_training(tiny_model(**changes), forward, OptimizerSettings(1e-3), ranks, stages=plan)
    assert isinstance(training, PipelinedTraining)
    # as its step does, on every rank
    got = batch_totals(samples, RULE, training._over_ranks(training._accumulate(samples, RULE)))
    assert len(training._plan(samples)) >= micro_batches
    shards = training._pipeline
    shards._join_gradients()
    assert abs(got.loss - truth.loss) <= RELATIVE * abs(truth.loss), (got.loss, truth.loss)
    for name, value in truth.metrics.items():
        assert abs(got.metrics[name] - value) <= 1e-4 * max(1e-2, abs(value)), (name, got.metrics[name], value)
    assert shards._parameters
    for name, parameter in shards._parameters.items():
        expected = alone.get_parameter(name).grad
        assert parameter.grad is not None and expected is not None, name
        share = float((parameter.grad - expected).norm() / expected.norm())
        assert share <= RELATIVE, f"{name}: {share:.1e}"
    everything = dict(alone.named_parameters())
    norm = torch.nn.utils.get_total_norm([p.grad for p in everything.values() if p.grad is not None])
    assert abs(float(shards._norm()) - float(norm)) <= RELATIVE * float(norm)
    _check_scores(training, group)


def _check_scores(training: RankedTraining, group: Group) -> None:
    samples = make_samples(9, seed=2)
    found = training._score(samples)
    told = group.broadcast(torch.cat([torch.from_numpy(one) for one in found]).clone())
    assert torch.equal(told, torch.cat([torch.from_numpy(one) for one in found])), "every rank has all of them"
    assert float(told.max()) < 0.0, "log-probs, and none left at 0"


def planned(folder: str, size: int) -> Path:
    """Write a found order whose passes are split and of which two micro-batches repeat together."""
    found = search(shape("V", size, Costs(backward=2, split=True)), [2] * size, unroll=2)
    path = Path(folder) / "plan.json"
    path.write_bytes(msgspec.json.encode(make_plan(found, 8, None)))
    return path


def check(group: Group) -> None:
    # split passes, and a head whose gradient is made in parts
    in_parts = replace(FORWARD, head_bytes=10 * 3 * 8 * VOCABULARY)
    check_gradients(group, "1f1b")
    # the head is as dear as four layers, so the last stage has one of them
    check_gradients(group, "1f1b", num_hidden_layers=6, vocab_size=3000)
    check_gradients(group, "search", micro_batches=3)
    with tempfile.TemporaryDirectory() as folder:
        check_gradients(group, planned(folder, group.size), micro_batches=5)
    check_gradients(group, "zb-h1", forward=in_parts, tie_word_embeddings=False)
    if group.size == 2:
        # each of the four layers is a stage, and the two ends are on one rank
        check_gradients(group, "search", stages=4)
        check_gradients(group, "zb-v", forward=in_parts)
        check_gradients(group, "interleaved", micro_batches=5)
        check_gradients(group, "dualpipev", micro_batches=2)


def main() -> int:
    if not is_rank():
        return launch([sys.executable, "-m", "tests.workers.engines.training.staged"], int(sys.argv[1]), name="staged")
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
