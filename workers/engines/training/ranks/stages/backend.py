"""The learner's backend as a pipeline: every rank packs every micro-batch, and the last stage's computes the loss."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import torch

from pipeline.algorithms.batching import TrainingSample, plan_ranks
from pipeline.process import work
from pipeline.schedule.timetable import Orders
from workers.engines.model.optimizer import OptimizerSettings, embedding_names
from workers.engines.model.packed import find_prefixes, share_of_plan
from workers.engines.scoring.seam import ScoringRequest
from workers.engines.training.policy_gradient import BatchLoss, BatchSums, ForwardSettings
from workers.engines.training.publishing import PublishSettings
from workers.engines.training.ranks.backend import RankedTraining
from workers.engines.training.ranks.group import Group
from workers.engines.training.ranks.messages import Lead
from workers.engines.training.ranks.sharded import ShardedModel
from workers.engines.training.ranks.stages.cut import cut_model
from workers.engines.training.ranks.stages.runtime import actions_of, run_actions
from workers.engines.training.ranks.stages.shards import PipelineShards
from workers.engines.training.trained_weights import WeightsForm
from workers.engines.value.seam import ValueSample

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from pipeline.algorithms.base import Rule


@dataclass(frozen=True, slots=True)
class StagePlan:
    """Where a pipeline's stages are, and the order of their work."""

    ranks: Sequence[int]
    """The rank of each stage."""
    micro_batches: int
    """How many micro-batches a step has at least, if it has as many responses."""
    orders: Callable[[int], Orders]
    """The orders of so many micro-batches, or of a few more, by rank."""


class PipelinedTraining(RankedTraining):
    def __init__(
        self,
        model: ShardedModel,
        shards: PipelineShards,
        forward: ForwardSettings,
        plan: StagePlan,
        num_layers: int,
        publishing: PublishSettings | None = None,
    ) -> None:
        super().__init__(model, forward, publishing)
        self._pipeline, self._stage_plan, self._num_layers = shards, plan, num_layers
        self._orders = cache(plan.orders)

    def _plan(self, sequences: Sequence[TrainingSample | ScoringRequest | ValueSample]) -> list[list[int]]:
        """Return all micro-batches, which every rank passes through its stages."""
        prefixes = find_prefixes([sequence.tokens for sequence in sequences], self._group.device)
        shares = plan_ranks(prefixes, self._stage_plan.micro_batches, self._max_tokens)
        return [micro for share in shares for micro in share if micro]

    def _accumulate(self, samples: Sequence[TrainingSample], rule: Rule) -> BatchSums:
        batch, plan = BatchLoss(samples, rule, self._group.device), self._plan(samples)
        orders = self._orders(len(plan))
        # empty ones, if the schedule cannot do so few
        plan += [[]] * (1 + max(step.micro_batch for step in orders[0]) - len(plan))
        micros = [batch.micro_batch(indices) for indices in plan]
        lengths = [int(sample.tokens.size) for sample in samples]
        stages = self._pipeline.stages
        own_layers = sum(len(stage.layers) for stage in stages.values())

        def compute(index: int, states: torch.Tensor | None, number: int) -> torch.Tensor:
            stage, micro = stages[index], micros[number]
            # a layer marks its share of the model, and this rank has only some of them
            share = share_of_plan(plan, plan[number], lengths) * self._num_layers / own_layers
            with work.listening(_Portion(work.current(), share)):
                made = stage(states, micro.tokens, micro.loss)
            if stage.is_last:
                micro.count(made)
            return made

        some = next(iter(stages.values()))
        run_actions(
            actions_of(orders),
            stages,
            compute,
            num_stages=len(self._stage_plan.ranks),
            lengths=[micro.tokens.tokens.numel() for micro in micros],
            width=some.width,
            dtype=some.dtype,
            device=self._group.device,
        )
        return BatchSums(batch.sums, batch.largest)

    def _over_ranks(self, sums: BatchSums) -> BatchSums:
        """Add up; only the last stage's rank knows which metrics there are."""
        source = self._stage_plan.ranks[-1]
        names = json.dumps(list(sums.sums)).encode() if source == self._group.rank else None
        told = json.loads(self._group.broadcast_bytes(names, source=source).tobytes())
        nothing = torch.zeros((), dtype=torch.float64, device=self._group.device)
        return super()._over_ranks(BatchSums({name: sums.sums.get(name, nothing) for name in told}, sums.largest))


class _Portion(work.Meter):
    """Passes a share of each mark on to another meter."""

    def __init__(self, meter: work.Meter, share: float) -> None:
        super().__init__()
        self._meter, self._part = meter, share

    def step(self, share: float = 0.0) -> None:
        self._meter.step(share * self._part)


def make_pipelined(
    model: PreTrainedModel,
    form: WeightsForm,
    forward: ForwardSettings,
    optimizer: OptimizerSettings,
    group: Group,
    lead: Lead,
    plan: StagePlan,
    publishing: PublishSettings | None = None,
) -> PipelinedTraining:
    """Cut ``model``, which is prepared for packed rows and the same on every rank.

    Raises EngineError if the model cannot be cut."""
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    dtype, embeddings = model.dtype, embedding_names(model)
    stages = cut_model(model, forward, len(plan.ranks))
    num_layers = stages[-1].layers.stop
    shards = PipelineShards(model, stages, plan.ranks, optimizer, group, embeddings)
    sharded = ShardedModel(form, shards, optimizer, group, lead, trained=trained, dtype=dtype)
    return PipelinedTraining(sharded, shards, forward, plan, num_layers, publishing)
