"""The roles of a run on devices: how long each takes for an update, and what it holds of a device's memory.

Rates are roofs times the share of them that is reached (``devices.toml``): a decode step reads the weights and the caches
of its sequences from memory, everything else multiplies. What the ranks of a learner send one another is counted in the
program of their split (``pipeline.plan.traffic``). Memory is that of ``pipeline.preflight.device_memory``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, Literal

from msgspec.structs import replace

from pipeline.config.learning import DeepSpeedSection
from pipeline.config.schema import RunConfig
from pipeline.plan.costs import Costs, GeneratorCosts, LearnerCosts, WeightsCosts
from pipeline.plan.devices import PER_HOST, Device
from pipeline.plan.programs.preserve import Zero
from pipeline.plan.traffic import Flow, RankGrid, flows
from pipeline.plan.transformer import Transformer
from pipeline.plan.workload import Workload
from pipeline.preflight.device_memory import DeviceNeed, device_need, generator_parts, largest_share, learning_plan
from pipeline.preflight.memory_needs import HEAD_BYTES, activation_bytes

SLOTS: Final = 256
"""Most sequences of a generator."""
_LEAST_SLOTS: Final = 8
"""With room for fewer a generator does not fit: it would read all weights for a few tokens."""
USED: Final = 0.9
"""Of a device's memory: the rest is the allocator's."""
_SYNC_S: Final = 1e-5
"""Latency of a collective between the devices of a host."""
_STEP_S: Final = 2e-3
"""A decode step on a GPU besides its products: sampling and the engine's own work."""
_PCIE: Final = 25e9
"""Bytes a second between a device and its host, for offloaded optimisers."""
_CACHE_ROOM: Final = 1.25
"""Caches are planned for sequences that are longer than the mean context."""
_TENSOR: Final = (1, 2, 4, 8)
_DEFAULTS: Final = Costs(generator=GeneratorCosts(), learner=LearnerCosts())
Backend = Literal["torch", "fsdp2", "deepspeed", "pipeline"]


@dataclass(frozen=True, slots=True)
class Split:
    """How a learner or critic is split over the devices of a group."""

    backend: Backend
    ranks: int
    stage: Zero = 0
    """Of ZeRO, with DeepSpeed."""
    offload: bool = False
    tensor: int = 1
    """Ranks that share each layer's matrices, with FSDP2."""

    @property
    def grid(self) -> RankGrid:
        if self.backend == "pipeline":
            return RankGrid(stages=self.ranks)
        return RankGrid(self.ranks // self.tensor, self.tensor, 3 if self.backend == "fsdp2" else self.stage)

    @property
    def runs_here(self) -> bool:
        """Whether this version can execute it: ranks are of one host."""
        return self.ranks <= PER_HOST

    def settings(self) -> dict[str, Any]:
        """Return the settings of its section."""
        zero = {"stage": self.stage or 2, "offload_optimizer": {"device": "cpu"} if self.offload else {}}
        return {
            "backend": self.backend,
            "ranks": self.ranks,
            "tensor_parallel": self.tensor,
            "deepspeed": DeepSpeedSection.model_validate(zero),
        }

    def in_words(self) -> str:
        if self.backend == "torch":
            return "one rank"
        kind = {"fsdp2": "fsdp2", "pipeline": "pipeline"}.get(self.backend, f"ZeRO {self.stage}")
        more = ", optimiser on the host" if self.offload else f", layers over {self.tensor}" if self.tensor > 1 else ""
        return f"{kind} over {self.ranks}{more}"


def splits(ranks: int, heads: int) -> list[Split]:
    """Return the splits of a learner over so many devices. Stage 3 of ZeRO is fsdp2; ranks that
    share a layer share ``heads`` evenly."""
    if ranks == 1:
        return [Split("torch", 1)]
    stages = [Split("deepspeed", ranks, 1), Split("deepspeed", ranks, 2), Split("deepspeed", ranks, 2, offload=True)]
    layers = [Split("fsdp2", ranks, tensor=n) for n in _TENSOR if ranks % n == 0 and heads % n == 0]
    return [*layers, *stages, Split("deepspeed", ranks, 3, offload=True), Split("pipeline", ranks)]


@dataclass(frozen=True, slots=True)
class Trained:
    """A model that learns on the devices of a group, which fits."""

    split: Split
    num_bytes: int
    micro_tokens: int
    recomputed: int
    """Layers."""


@dataclass(frozen=True)
class Roles:
    """Times and memory of a run's roles."""

    config: RunConfig
    """With the compute types of the run; its splits are not read."""
    model: Transformer
    work: Workload
    measured: Costs | None = None
    """Of one device each, in place of what the model's sizes say."""

    @property
    def item(self) -> int:
        return 2 if self.config.types.generator == "bfloat16" else 4

    def heads_to_share(self, *, is_value: bool = False) -> int:
        """Return the heads that ranks of a layer must share evenly; 1: they cannot, as with an adapter."""
        return 1 if self.config.learner.lora.rank and not is_value else self.model.heads_to_share

    # memory

    def trained(self, split: Split, room: float, *, is_value: bool = False) -> Trained | None:
        """Return a learner or critic in ``room`` bytes of each device; None if it does not fit."""
        if split.backend == "pipeline" and (is_value or self.config.learner.lora.rank):
            return None
        need = self.need(split, is_value=is_value)
        plan = learning_plan(self.config, need, int(room), is_value=is_value)
        recomputed = self.model.layers if plan.recomputed is True else int(plan.recomputed)
        return Trained(split, plan.num_bytes, plan.tokens, recomputed) if plan.fits else None

    @cached_property
    def _generator_parts(self) -> Mapping[str, int]:
        return generator_parts(self.config, self.model.shape)

    def need(self, split: Split, *, is_value: bool = False) -> DeviceNeed:
        """Return what each device of a split holds, as `headrace doctor` counts it."""
        if (split, is_value) not in self._needs:
            more = split.settings()
            sections = {
                "learner": self.config.learner.model_copy(update=more),
                "value": self.config.value.model_copy(update=more),
            }
            config = self.config.model_copy(update=sections)
            self._needs[split, is_value] = device_need(config, self.model.shape, is_value=is_value)
        return self._needs[split, is_value]

    @cached_property
    def _needs(self) -> dict[tuple[Split, bool], DeviceNeed]:
        return {}

    def generator_bytes(self, tensor: int) -> int:
        """Return what a generator holds of each device besides its caches."""
        parts = self._generator_parts
        return parts["weights"] // tensor + parts["graphs and work"]

    def engine_bytes(self, tensor: int, slots: int) -> float:
        """Return what a generator holds of each device, with the caches of so many sequences."""
        return self.generator_bytes(tensor) + slots * self._cache_bytes(tensor)

    def _cache_bytes(self, tensor: int) -> float:
        return (
            self.model.cache_bytes(self.item) * self.work.mean_context * _CACHE_ROOM / min(tensor, self.model.key_heads)
        )

    def slots(self, tensor: int, room: float) -> int:
        """Return how many sequences' caches fit into ``room`` bytes of each device; 0 if it is too few."""
        left = room - self.generator_bytes(tensor)
        found = min(SLOTS, int(left / self._cache_bytes(tensor)))
        return found if found >= _LEAST_SLOTS else 0

    def scorer_bytes(self) -> int:
        """Return what a reference model holds of its device."""
        tokens = max(self.config.reference.micro_batch_tokens, int(self.work.prompt_tokens) + self.work.longest)
        return (
            self.model.num_weights * self.item
            + activation_bytes(self.model.shape, tokens) // self.model.layers
            + HEAD_BYTES
        )

    # times

    def generator(self, device: Device, tensor: int, slots: int) -> GeneratorCosts:
        """Return the costs of a generator on ``tensor`` devices."""
        if self.measured is not None and tensor == 1:
            measured = self.measured.generator
            return replace(measured, slots=max(1, min(slots, round(measured.mean_live or slots))))
        model, read = self.model, device.reading_share * device.bandwidth * tensor
        multiplied = device.training_share * device.flops * tensor
        # with many sequences every expert is given some token
        weights = model.num_weights if model.experts else model.matrix_weights
        summed = 2 * model.layers * 2 * (tensor - 1) / tensor * model.hidden * self.item / device.link
        syncs_s = 2 * model.layers * _SYNC_S if tensor > 1 else 0.0
        return GeneratorCosts(
            slots=slots,
            decode_base_s=weights * self.item / read + syncs_s + (0.0 if device.is_cpu else _STEP_S),
            decode_sequence_s=model.forward_flops(0) / multiplied + summed,
            decode_context_token_s=model.cache_bytes(self.item) / read,
            prefill_token_s=model.forward_flops(self.work.prompt_tokens / 2) / multiplied + summed,
        )

    def response_s(self, costs: GeneratorCosts) -> float:
        """Return the time of a generator for a response while all its slots are full; its group shares the prompt."""
        step_s = costs.decode_s(costs.slots, costs.slots * self.work.mean_context)
        prefill_s = costs.prefill_token_s * self.work.prompt_tokens / self.work.group_size
        return self.work.response_tokens * step_s / costs.slots + prefill_s

    def learner(self, device: Device, trained: Trained, *, is_value: bool = False, sends: bool = True) -> LearnerCosts:
        """Return the costs of a learner or critic on the devices of its split; without what its ranks send one another, the
        least that they can be."""
        split, work, model = trained.split, self.work, self.model
        ranks, moved = split.ranks, self.moved(trained) if sends else []
        if self.measured is not None and not is_value:
            one = self.measured.learner
            faster = 1.0 if ranks == 1 else 0.9 * ranks
            return replace(one, sequence_s=one.sequence_s / faster, token_s=one.token_s / faster)
        weights, rate = model.num_weights, device.training_share * device.flops * ranks
        length = work.prompt_tokens + work.response_tokens * (1.0 + work.variation**2)
        flops = model.training_flops(length, trained.recomputed / model.layers)
        if work.has_old_logprobs or is_value:
            flops += model.forward_flops(length / 2)
        step_tokens, passes = work.tokens / work.steps, self._passes(trained)
        compute_s = step_tokens * flops / rate
        link = device.link if ranks <= PER_HOST else min(device.link, device.network)
        # ranks that share a layer are of one host
        states_s = sum(sent for flow, sent in moved if flow.of_states) / (device.link if split.tensor > 1 else link)
        weights_s = sum(sent for flow, sent in moved if not flow.of_states) / link
        if split.backend == "pipeline":
            # all wait for the dearest stage
            compute_s *= ranks * largest_share(model.shape, tuple(range(ranks))).work
            waits_s = compute_s * (ranks - 1) / max(self.config.learner.pipeline.micro_batches, passes * ranks)
            # gradients of a table that both ends have are summed after the last pass
            step_s = max(compute_s + waits_s, states_s) + weights_s
        else:
            # sums within a layer are waited for, all else runs beside
            step_s = max(compute_s, weights_s) + states_s
        # AdamW reads weights, gradient and moments, and writes all but the gradient
        adam_s = 28 * weights / ranks / (_PCIE if split.offload else device.reading_share * device.bandwidth)
        return LearnerCosts(
            base_s=adam_s, token_s=step_s / step_tokens, publish_s=weights * self.item / WeightsCosts().bytes_per_s
        )

    def _passes(self, trained: Trained) -> int:
        """Return the micro-batches of a share, for an optimiser step."""
        tokens = self.work.tokens / self.work.steps / (trained.split.ranks // trained.split.tensor)
        return max(1, math.ceil(tokens / trained.micro_tokens))

    def moved(self, trained: Trained) -> list[tuple[Flow, float]]:
        """Return the bytes that a rank sends for an optimiser step. Raises ConfigError if the split's program is wrong."""
        split = trained.split
        if split.ranks == 1:
            return []
        tokens, passes = self.work.tokens / self.work.steps / split.grid.shares, self._passes(trained)
        found = list[tuple[Flow, float]]()
        for flow in flows(self.model, split.grid, trained.recomputed):
            # sums of products alone are of the matrices' type; weights and what leaves a layer are float32
            item = self.item if flow.what == "states" and split.tensor > 1 else 4
            found.append((flow, item * (flow.per_step + passes * flow.per_pass + tokens * flow.per_token)))
        return found

    def scored_s(self, device: Device, number: int, work: Workload) -> float:
        """Return the time of so many reference workers for all responses of an update, in ``work``'s windows."""
        if self.measured is not None and self.measured.reference is not None:
            return self.measured.reference.batch_s(work.chunks, work.scored_tokens) / number
        length = work.prompt_tokens + work.response_tokens * (1.0 + work.variation**2)
        return (
            work.scored_tokens * self.model.forward_flops(length / 2) / (device.training_share * device.flops * number)
        )

    def weights_s(self) -> float:
        """Return the time from an update's end until generators can load its weights."""
        if self.measured is not None:
            return self.measured.weights.travel_s + self.measured.weights.load_s
        return WeightsCosts(num_bytes=self.model.num_weights * self.item).travel_s

    def ledger_s(self, work: Workload) -> float:
        """Return the ledger server's time for an update, in ``work``'s windows: a chunk for each."""
        return work.chunks * (self.measured or _DEFAULTS).ledger.served_s(min(work.window, work.response_tokens))

    def rewarded_s(self) -> float:
        """Return the time of one reward worker for all responses of an update, as far as it was measured."""
        reward = self.measured.reward if self.measured is not None else None
        work = self.work
        if reward is None:
            return 0.0
        return reward.batch_s(work.generated, work.generated * work.response_tokens) / reward.concurrency
