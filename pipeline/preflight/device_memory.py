"""The device memory of a learning worker, and the micro-batch that fits beside everything else.

    fixed       4P weights + 4P gradients + 8P AdamW (other optimisers and adapters: less)
                + 2P the weights in bfloat16 while a micro-batch is computed
                + the logits alive at once, and the head's gradient
    per token   the activations of ``memory_needs`` in float32, half of them in bfloat16

On an H100 (80 GB), in bfloat16, that is 38 GB for 0.5 B weights and micro-batches of 16,384 tokens,
where 33 GiB were measured, and 58 GB for 1.5 B and 8,192, where 52 GiB were."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from pipeline.config.schema import RunConfig
from pipeline.preflight.memory_needs import HEAD_BYTES, STATE_SHARE, Shape, activation_bytes
from pipeline.supervisor.standbys.pool import ITEM_BYTES

LEAST_TOKENS: Final = 1 << 10
"""Also the step between automatic sizes, so that two starts beside the same load get the same one."""
MOST_TOKENS: Final = 1 << 16
"""A GPU is no faster beyond it."""
_USED: Final = 0.9
"""Share of the free memory that is used: the rest is the allocator's fragments and CUDA's own."""
_FP32, _HALF = 4, 2
VLLM_SHARE: Final = 0.9
"""What vLLM takes of a GPU when gpu_memory_utilization is not set."""


@dataclass(frozen=True, slots=True)
class DeviceNeed:
    """Bytes that a learning worker takes on each of its devices."""

    parts: Mapping[str, int]
    """Whatever the micro-batch."""
    per_token: int
    """Of a micro-batch's activations."""

    @property
    def fixed(self) -> int:
        return sum(self.parts.values())

    def tokens_in(self, room: int) -> int:
        """Return the micro-batch, in tokens, that fits into ``room`` bytes; 0 if not even the
        smallest does."""
        fitting = int((_USED * room - self.fixed) / self.per_token) // LEAST_TOKENS * LEAST_TOKENS
        return max(0, min(MOST_TOKENS, fitting))


def device_need(config: RunConfig, shape: Shape, *, is_value: bool = False) -> DeviceNeed:
    section = config.value if is_value else config.learner
    dtype = config.value.dtype if is_value else config.model.dtype
    checkpointing = (config.value if is_value else config.model).gradient_checkpointing
    is_whole = is_value or not config.learner.lora.rank
    weights = shape.num_weights * _FP32
    trained = weights if is_whole else 0
    state = int(trained * (2.0 if is_value else STATE_SHARE.get(config.learner.optimizer, 2.0)))
    parts = {"weights": weights, "gradients": trained, "optimiser": state}
    parts = {name: size // section.ranks for name, size in parts.items()}
    if dtype == "bfloat16":
        parts["weights in bfloat16"] = shape.num_weights * _HALF
    if not is_value:
        head = shape.vocabulary * shape.hidden * _FP32 if is_whole else 0
        parts["logits"] = HEAD_BYTES + head
    per_token = activation_bytes(shape, 1, checkpointing=checkpointing) * ITEM_BYTES[dtype] // _FP32
    return DeviceNeed(parts, per_token)


def taken_by_others(config: RunConfig, shape: Shape, total: int, *, num_gpus: int) -> int:
    """Return the bytes that other workers of the run will take of the learner's GPU of ``total``
    bytes, if it is the only one; where there are several, each is on its own."""
    if num_gpus > 1 or not config.has_sampling or config.generation.has_own_engine or config.generation.device == "cpu":
        return 0
    generation = config.generation
    if generation.engine == "vllm":
        return int(total * float(generation.vllm.engine_args.get("gpu_memory_utilization", VLLM_SHARE)))
    item = ITEM_BYTES[generation.dtype]
    tokens = generation.num_slots * (config.data.max_prompt_tokens + generation.max_response_tokens)
    cache = tokens * shape.layers * 2 * shape.key_width * item
    # the local engine's cache grows with its responses: all of them at their limit is the rare case
    return min(shape.num_weights * item + cache, total // 2)
