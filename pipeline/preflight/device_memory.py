"""The memory of a run's GPUs, worker by worker, and the micro-batches and layers to recompute that fit.

A learning worker, with P weights (tied ones once), on each of its devices:

    fixed       4P weights + 4P gradients + 8P AdamW (other optimisers: less)
                + 2P the weights in bfloat16 while a micro-batch is computed
                or below an adapter 2P in bfloat16, 4 + 2 for a number of the embedding; the rest is the adapter's
                + the logits alive at once, and the head's gradient
    per token   what each layer keeps for its backward pass, or its input alone where it is recomputed

Ranks share the fixed part, with DeepSpeed as much of it as its stage does. Of a pipeline it is that of the rank with
most weights (``largest_share``), and per token of that with most layers, which keeps a micro-batch for each rank.

On an H100 (80 GB), in bfloat16, that is 38 GB for 0.5 B weights and micro-batches of 16,384 tokens,
where 33 GiB were measured, and 58 GB for 1.5 B and 8,192, where 52 GiB were. What a layer keeps was
counted (``tests/workers/engines/model/test_recomputing.py``); a tenth more is for passing work."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Final

from pipeline.config.gpus import gpus_each, gpus_of
from pipeline.config.schema import RunConfig
from pipeline.preflight.memory_needs import (
    HEAD_BYTES,
    STATE_SHARE,
    Shape,
    activation_bytes,
    count_weights,
    frozen_bytes,
    recomputed_layers,
)
from pipeline.schedule.layers import cut_layers
from pipeline.schedule.stages import stage_ranks
from pipeline.supervisor.fleet_size import desired_counts
from pipeline.supervisor.standbys import ITEM_BYTES
from protocol.ids import Role

LEAST_TOKENS: Final = 1 << 10
"""Also the step between automatic sizes, so that two starts beside the same load get the same one."""
MOST_TOKENS: Final = 1 << 16
"""A GPU is no faster beyond it."""
GOOD_TOKENS: Final = 1 << 12
"""With fewer a GPU waits for the host: recomputing layers to have as many costs less."""
_USED: Final = 0.9
"""Share of the free memory that is used: the rest is the allocator's fragments and CUDA's own."""
_FP32, _HALF = 4, 2
_CUDA: Final = 512 << 20
"""CUDA's own memory in a process."""
_PREFILLED: Final = 8192
"""Tokens of vLLM's forward pass at most."""
VLLM_SHARE: Final = 0.92
"""What vLLM takes of a GPU when gpu_memory_utilization is not set."""


_KEPT: Final = {"float32": (9.0, 4.5, 3.0), "bfloat16": (18.0, 4.0, 7.0)}
"""Numbers that a layer keeps of a token, as multiples of its hidden, intermediate and key width."""


_SHARED_FROM: Final = {"optimiser": 1, "gradients": 2, "weights": 3, "adapter": 3}
"""The stage of ZeRO from which ranks share a part."""


@dataclass(frozen=True, slots=True)
class DeviceNeed:
    """Bytes that a learning worker takes on each of its devices."""

    parts: Mapping[str, int]
    """Whatever the micro-batch."""
    layers: int
    of_layer: int
    """Kept by one layer of each token of a micro-batch."""
    of_input: int
    """Kept instead by a recomputed one."""

    @property
    def fixed(self) -> int:
        return sum(self.parts.values())

    def per_token(self, recomputed: int = 0) -> int:
        """``recomputed``: of the layers, from the first on. While one of them is computed again, the
        others have freed theirs."""
        return recomputed * self.of_input + max(1, self.layers - recomputed) * self.of_layer

    def tokens_in(self, room: int, recomputed: int = 0) -> int:
        """Return the micro-batch, in tokens, that fits into ``room`` bytes; 0 if not even the
        smallest does."""
        fitting = int((_USED * room - self.fixed) / self.per_token(recomputed)) // LEAST_TOKENS * LEAST_TOKENS
        return max(0, min(MOST_TOKENS, fitting))


@dataclass(frozen=True, slots=True)
class LargestShare:
    """What the rank of a pipeline with most of it has of a model."""

    weights: float
    layers: float
    work: float
    """Of what a token multiplies."""


@cache
def largest_share(shape: Shape, ranks: tuple[int, ...]) -> LargestShare:
    """Return the largest shares of the ranks of a pipeline whose stages are on ``ranks``.

    With experts, as if a token multiplied all of them. More stages than layers, which no learner starts with, share the
    model evenly."""
    if len(ranks) > shape.layers:
        even = 1 / len({*ranks})
        return LargestShare(even, even, even)
    embedding = shape.vocabulary * shape.hidden
    layer = max(1, (shape.num_weights - embedding * (1 if shape.is_tied else 2)) // shape.layers)
    stages = cut_layers([*[layer] * (shape.layers - 1), layer + embedding], len(ranks))
    layers = dict.fromkeys(ranks, 0)
    for rank, stage in zip(ranks, stages, strict=True):
        layers[rank] += len(stage)
    weights = {rank: number * layer for rank, number in layers.items()}
    work = weights | {ranks[-1]: weights[ranks[-1]] + embedding}
    # tied ones on one rank are held once
    for rank in {ranks[0], ranks[-1]} if shape.is_tied else (ranks[0], ranks[-1]):
        weights[rank] += embedding
    return LargestShare(
        max(weights.values()) / shape.num_weights,
        max(layers.values()) / shape.layers,
        max(work.values()) / sum(work.values()),
    )


def device_need(config: RunConfig, shape: Shape, *, is_value: bool = False) -> DeviceNeed:
    section = config.value if is_value else config.learner
    dtype = config.types.value if is_value else config.types.learner
    rank = 0 if is_value else config.learner.lora.rank
    whole = shape.num_weights * _FP32
    weights = frozen_bytes(config, shape) if rank else whole
    # an adapter on all linear layers of the blocks, if it is one
    around = 9 * shape.hidden + 3 * shape.intermediate + 2 * shape.key_width
    trained = shape.layers * rank * around * _FP32 if rank else whole
    state = int(trained * (2.0 if is_value else STATE_SHARE.get(config.learner.optimizer, 2.0)))
    parts = {"weights": weights, "adapter": trained if rank else 0, "gradients": trained, "optimiser": state}
    share, kept = 1 / section.ranks, 1.0
    if section.backend == "pipeline":
        pipe = config.learner.pipeline
        found = largest_share(shape, tuple(stage_ranks(pipe.schedule, section.ranks, pipe.stages)))
        # a micro-batch for each rank
        share, kept = found.weights, found.layers * section.ranks
    zero = section.deepspeed if section.backend == "deepspeed" else None
    parts = {
        name: int(size * share) if zero is None or zero.stage >= _SHARED_FROM[name] else size
        for name, size in parts.items()
    }
    if zero is not None and zero.offload_optimizer:
        parts["optimiser"] = 0
    if dtype == "bfloat16":
        embedding = shape.vocabulary * shape.hidden
        # what is kept in bfloat16 needs no copy, but ranks gather a layer and the embedding
        copied = (shape.num_weights if weights == whole else embedding) * _HALF
        gathered = shape.num_weights * _HALF // shape.layers + embedding * _FP32
        if section.backend == "pipeline":
            copied = int(copied * share)
        parts["weights in bfloat16"] = copied + (gathered if weights < whole and section.ranks > 1 else 0)
    if not is_value:
        head = shape.vocabulary * shape.hidden * _FP32 if not rank else 0
        parts["logits"] = HEAD_BYTES + head
    of_hidden, of_intermediate, of_keys = _KEPT[dtype]
    split = of_intermediate * shape.intermediate + of_keys * shape.key_width
    # tensor parallelism keeps whole hidden states
    numbers = of_hidden * shape.hidden + split / section.tensor_parallel
    return DeviceNeed(parts, shape.layers, int(kept * numbers * ITEM_BYTES[dtype]), int(kept * shape.hidden * _FP32))


@dataclass(frozen=True, slots=True)
class LearningPlan:
    tokens: int
    """Of a micro-batch."""
    recomputed: bool | int
    """Layers, from the first on; True for all."""
    num_bytes: int
    """With the longest sample, which gets a pass of its own if it exceeds a micro-batch."""
    fits: bool


def learning_plan(config: RunConfig, need: DeviceNeed, room: int, *, is_value: bool = False) -> LearningPlan:
    """Plan a learning worker that has ``room`` bytes of a device: settings that are not automatic
    as they are, the least recomputation with which a micro-batch of ``GOOD_TOKENS`` fits, and the
    largest micro-batch that then does."""
    given = (config.value if is_value else config.learner).micro_batch_tokens
    layers = (config.value if is_value else config.model).gradient_checkpointing
    longest = longest_sample(config)
    least = max(longest, LEAST_TOKENS if given == "auto" else given)
    wanted = max(least, GOOD_TOKENS) if given == "auto" else least
    choices = range(need.layers) if layers == "auto" else (recomputed_layers(layers, need.layers),)

    def size(tokens: int, recomputed: int) -> int:
        return need.fixed + tokens * need.per_token(recomputed)

    recomputed = next((one for one in choices if size(wanted, one) <= _USED * room), choices[-1])
    tokens = max(LEAST_TOKENS, need.tokens_in(room, recomputed)) if given == "auto" else given
    used = size(max(tokens, longest), recomputed)
    return LearningPlan(tokens, recomputed, used, size(least, recomputed) <= _USED * room)


def generator_parts(config: RunConfig, shape: Shape) -> dict[str, int]:
    """Return the bytes of one generator on each of its GPUs, with room in its cache for all slots at
    their longest."""
    generation, vllm = config.generation, config.generation.vllm
    tensor, data, work = 1, 1, _CUDA
    item = ITEM_BYTES[config.types.generator]
    if generation.engine == "vllm":
        tensor, data = vllm.tensor_parallel_size, vllm.data_parallel_size
        # CUDA graphs; a prefill of as many tokens as vLLM takes at once; logits and their log-probs
        of_prefill = _PREFILLED * (4 * shape.hidden + 3 * shape.intermediate) * item // tensor
        work = 3 * _CUDA + of_prefill + 4 * generation.num_slots * shape.vocabulary * _FP32
    slots = -(-generation.num_slots // data)
    cache = slots * longest_sample(config) * shape.layers * 2 * shape.key_width * item // tensor
    return {"weights": shape.num_weights * item // tensor, "KV cache": cache, "graphs and work": work}


def longest_sample(config: RunConfig) -> int:
    return config.data.max_prompt_tokens + config.generation.max_response_tokens


def workers_by_card(config: RunConfig) -> dict[int, dict[Role, int]]:
    """Return how many workers of each role compute on each GPU of the learner's host, by its number.
    ``auto`` is GPU 0; ranks take the GPUs from 0 on, as vLLM does; ``fleet.gpus`` may say otherwise."""
    counts = {role: number for role, number in desired_counts(config).items() if role not in config.launch.elsewhere}
    learner, value, reference, generation = config.learner, config.value, config.reference, config.generation
    judge = config.reward.model
    places: dict[Role, tuple[str, bool]] = {
        Role.LEARNER: (config.model.device, not learner.has_own_engine),
        Role.VALUE: (value.device, not value.has_own_engine),
        Role.GENERATOR: (generation.device, config.has_sampling and not generation.has_own_engine),
        Role.REFERENCE: (reference.device, not reference.has_own_engine),
        Role.REWARD: (judge.device if judge else "cpu", judge is not None),
    }
    cards: dict[int, dict[Role, int]] = {}
    for role, (device, is_ours) in places.items():
        if not is_ours or device == "cpu" or not counts.get(role):
            continue
        own = [card for number in range(counts[role]) for card in gpus_of(config, role, number)]
        for card in own:
            here = cards.setdefault(card, {})
            here[role] = here.get(role, 0) + 1
        if own:
            continue
        number = gpus_each(config, role)
        first = int(device.partition(":")[2] or 0)
        from_0 = number > 1 or (role is Role.GENERATOR and generation.engine == "vllm")
        for card in range(number) if from_0 else [first]:
            cards.setdefault(card, {})[role] = counts[role]
    return dict(sorted(cards.items()))


def share_card(
    config: RunConfig, here: Mapping[Role, int], shapes: tuple[Shape, Shape | None], total: int
) -> dict[Role, int]:
    """Divide a GPU of ``total`` bytes among ``here``, the number of workers of each role on it;
    return the bytes of one worker of each.

    A generator gets a cache for all its slots, less if the learning workers' least needs leave less,
    but at least a quarter; learning workers get the rest, in proportion to these needs. What a
    setting gives vLLM is its."""
    least = {
        role: math.ceil(learning_plan(config, need, 0, is_value=role is Role.VALUE).num_bytes / _USED) + 1
        for role, need in learning_needs(config, here, shapes).items()
    }
    found: dict[Role, int] = {}
    shape = shapes[0]
    if Role.REFERENCE in here:
        found[Role.REFERENCE] = _scorer(config, shape, total)
    if Role.REWARD in here and config.reward.model is not None:
        found[Role.REWARD] = 2 * _CUDA + count_weights(config.reward.model.path) * ITEM_BYTES[config.reward.model.dtype]
    if Role.GENERATOR in here:
        parts, number = generator_parts(config, shape), here[Role.GENERATOR]
        wanted, given = sum(parts.values()), config.generation.vllm.engine_args
        rest = (total - sum(found.values()) - sum(least.values())) // number
        size = min(wanted, max(rest, wanted - parts["KV cache"] * 3 // 4))
        if config.generation.engine == "vllm" and "kv_cache_memory_bytes" in given:
            size = wanted - parts["KV cache"] + int(given["kv_cache_memory_bytes"])
        elif config.generation.engine == "vllm" and ("gpu_memory_utilization" in given or sum(here.values()) == 1):
            size = int(total * float(given.get("gpu_memory_utilization", VLLM_SHARE)))
        found[Role.GENERATOR] = size
    left = total - sum(size * here[role] for role, size in found.items())
    return found | {role: max(0, left) * size // sum(least.values()) for role, size in least.items()}


def learning_needs(
    config: RunConfig, here: Mapping[Role, int], shapes: tuple[Shape, Shape | None]
) -> dict[Role, DeviceNeed]:
    found = {Role.LEARNER: device_need(config, shapes[0])} if Role.LEARNER in here else {}
    if Role.VALUE in here and shapes[1] is not None:
        found[Role.VALUE] = device_need(config, shapes[1], is_value=True)
    return found


def _scorer(config: RunConfig, shape: Shape, total: int) -> int:
    if config.scores_with_vllm:
        return int(total * float(config.reference.vllm.engine_args.get("gpu_memory_utilization", VLLM_SHARE)))
    work = activation_bytes(shape, max(config.reference.micro_batch_tokens, longest_sample(config))) // shape.layers
    return shape.num_weights * ITEM_BYTES[config.types.learner] + work + HEAD_BYTES


def vllm_share(config: RunConfig, shape: Shape, total: int) -> float | None:
    """Return the ``gpu_memory_utilization`` of a vLLM generator beside other workers on a GPU of
    ``total`` bytes; None if it is set, or the generator has its GPUs for itself."""
    given = config.generation.vllm.engine_args
    cards = [here for here in workers_by_card(config).values() if Role.GENERATOR in here]
    if config.generation.engine != "vllm" or {"gpu_memory_utilization", "kv_cache_memory_bytes"} & given.keys():
        return None
    shared = [here for here in cards if len(here) > 1 or here[Role.GENERATOR] > 1]
    sizes = [share_card(config, here, (shape, shape), total)[Role.GENERATOR] for here in shared]
    return math.ceil(1000 * min(sizes) / total) / 1000 if sizes else None
