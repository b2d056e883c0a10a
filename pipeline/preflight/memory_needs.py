"""Compares the memory that a run needs, role by role, with the memory of this machine.

    learner      4P weights + 4P gradients + 8P AdamW (2P in 8 bits, 4P Muon, 0 Adafactor);
                 2P below an adapter in bfloat16, 4 for a number of the embedding
                 + activations of a micro-batch + a copy of weights and optimiser while a checkpoint is written
    value        the same, with a critic
    generator    P weights in their type (on a CPU the published ones, in place) + KV cache of all slots
    reference    P weights + the activations of one layer
    /dev/shm     (weights.keep + 1) P published, once a host
                 + the learner's weights and optimiser twice, and a value worker's twice,
                   for snapshots, if they fit or are required
    standby      P weights of each model that it prepares, idle; left out if they do not fit
    ledger       ledger.max_memory_mb

P is the number of weights, tied ones once. Activations are those of a decoder layer without
gradient checkpointing: (18 hidden + 4 intermediate + 7 key width) numbers a token and layer. They
were measured on a CPU in fp32 (``tests/pipeline/preflight/test_memory_needs.py``). A GPU's memory
does not count; a checkpoint's copy on the host does."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pipeline.algorithms.batching import tokens_at_once
from pipeline.config.schema import RunConfig
from pipeline.config.shares import gathered_ranks
from pipeline.preflight.findings import CheckFinding, fine, warn
from pipeline.preflight.model_folder import read_model_config
from pipeline.runtime.machine import CONTROL_GROUPS, Machine, free_in_group
from pipeline.supervisor.standbys import (
    ITEM_BYTES,
    LIGHT_BYTES,
    PROCESS_BYTES,
    StandbyKind,
    standby_parts,
    standby_roles,
)
from pipeline.weights.tensorfile import read_head
from protocol.errors import ConfigError, WeightsDamaged
from protocol.ids import Role

PUBLISHED = "published weights"
SNAPSHOTS = "snapshots"
STANDBYS = "standbys"
LEARNER_STANDBY = "learner's standby"
_BY = {STANDBYS: "fleet.standby", LEARNER_STANDBY: "fleet.standby_learner"}
_FP32 = 4
HEAD_BYTES = 768 << 20
"""Of logits alive at once, and of what is made of them (``workers.engines.model.head``)."""
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 -- asked only how much room it has


@dataclass(frozen=True, slots=True)
class Shape:
    num_weights: int
    layers: int
    hidden: int
    intermediate: int
    key_width: int
    """Key heads times their width."""
    vocabulary: int
    has_experts: bool = False
    is_tied: bool = False
    """Whether the head is the embedding."""


@dataclass(frozen=True, slots=True)
class Need:
    name: str
    parts: Mapping[str, int]
    """Bytes by purpose."""
    certain: int
    """Bytes that are needed whatever the data."""
    is_optional: bool = False
    """Whether the run does without it if it does not fit."""

    @property
    def num_bytes(self) -> int:
        return sum(self.parts.values())

    def in_words(self) -> str:
        """Return a phrase: ``learner 16.2 GB (weights 2.0, gradients 2.0, ...)``."""
        parts = ", ".join(f"{name} {_gb(size)}" for name, size in self.parts.items() if size >= 50e6)
        return f"{self.name} {_gb(self.num_bytes)} GB" + (f" ({parts})" if parts else "")


_ON_GPU = Need("", {"process": 4 * PROCESS_BYTES}, 0)
"""A process with its model on a GPU: CUDA's libraries and staging."""


def recomputed_layers(setting: Literal["auto"] | bool | int, layers: int) -> int:
    """Return how many of so many layers are recomputed; automatic, where there is room, none."""
    return 0 if setting == "auto" else layers if setting is True else min(int(setting), layers)


def activation_bytes(shape: Shape, tokens: int, recomputed: int = 0) -> int:
    """Return the bytes that a forward pass over ``tokens`` keeps for its backward pass on a CPU, in
    fp32, if so many layers are recomputed."""
    layer = tokens * (18 * shape.hidden + 4 * shape.intermediate + 7 * shape.key_width) * _FP32
    return max(1, shape.layers - recomputed) * layer + recomputed * tokens * shape.hidden * _FP32


def needs(
    config: RunConfig,
    shape: Shape,
    counts: Mapping[Role, int],
    value_shape: Shape | None = None,
    *,
    on_cpu: Callable[[str], bool],
) -> list[Need]:
    """Return the host memory that each process of a run needs (``counts`` workers by role), then
    the needs of the host itself. ``on_cpu`` tells whether a configured device is the CPU."""
    found: list[Need] = []
    if not config.learner.has_own_engine and counts.get(Role.LEARNER):
        is_here = on_cpu(config.model.device)
        found.append(_trained("learner", shape, config, is_value=False, on_cpu=is_here))
    if not config.has_sampling:
        found += _each("generator", counts.get(Role.GENERATOR, 0), Need("", {"process": LIGHT_BYTES}, 0))
    elif not config.generation.has_own_engine:
        need = _generator(shape, config) if on_cpu(config.generation.device) else _ON_GPU
        found += _each("generator", counts.get(Role.GENERATOR, 0), need)
    if config.has_reference and config.reference.backend == "torch":
        weights = shape.num_weights * ITEM_BYTES[config.types.learner]
        work = activation_bytes(shape, config.reference.micro_batch_tokens) // shape.layers
        parts = {"weights": weights, "activations": work, "process": PROCESS_BYTES}
        need = Need("", parts, weights) if on_cpu(config.reference.device) else _ON_GPU
        found += _each("reference", counts.get(Role.REFERENCE, 0), need)
    if value_shape is not None and not config.value.has_own_engine and counts.get(Role.VALUE):
        found.append(_trained("value", value_shape, config, is_value=True, on_cpu=on_cpu(config.value.device)))
    reward = PROCESS_BYTES if config.reward.model is not None else LIGHT_BYTES
    found += _each("reward", counts.get(Role.REWARD, 0), Need("", {"process": reward}, 0))
    found += _each("environment", counts.get(Role.ENVIRONMENT, 0), Need("", {"process": LIGHT_BYTES}, 0))
    ledger = config.ledger.max_memory_mb << 20 if config.ledger.url is None else 0
    found.append(Need("ledger", {"data at its limit": ledger}, 0))
    if not config.learner.has_own_engine:
        found.append(published(config, shape))
        found += snapshots(config, shape)
        if value_shape is not None and not config.value.has_own_engine and counts.get(Role.VALUE):
            found += value_snapshots(config, value_shape)
    return found + _standbys(config)


def _standbys(config: RunConfig) -> list[Need]:
    """Return the memory of standbys whose number is set. Automatic ones look for room when they
    start."""
    found: list[Need] = []
    if config.fleet.standby != "auto" and (num := config.fleet.standby):
        parts = standby_parts(config, standby_roles(config, StandbyKind.GENERIC))
        found.append(Need(STANDBYS, {name: num * size for name, size in parts.items()}, 0, is_optional=True))
    if config.fleet.standby_learner == "on" and (roles := standby_roles(config, StandbyKind.LEARNER)):
        found.append(Need(LEARNER_STANDBY, standby_parts(config, roles), 0, is_optional=True))
    return found


def snapshots(config: RunConfig, shape: Shape) -> list[Need]:
    trained = 0 if config.learner.lora.rank else shape.num_weights * _FP32
    state = int(trained * (1.0 + STATE_SHARE.get(config.learner.optimizer, 2.0)))
    return _snapshots(SNAPSHOTS, config, state, gathered_ranks(config.learner))


def value_snapshots(config: RunConfig, shape: Shape) -> list[Need]:
    return _snapshots(f"value {SNAPSHOTS}", config, 3 * shape.num_weights * _FP32, gathered_ranks(config.value))


def _snapshots(name: str, config: RunConfig, state: int, num_gathered: int) -> list[Need]:
    setting = config.checkpoint.snapshots
    if setting == "off" or (setting == "auto" and num_gathered > 1):
        return []
    return [Need(name, {"2 buffers": 2 * state}, 0, is_optional=setting == "auto")]


def published(config: RunConfig, shape: Shape) -> Need:
    """Return the memory of the published versions: those kept, and the next."""
    has_adapter = bool(config.learner.lora.rank)
    size = shape.num_weights * (4 if has_adapter else ITEM_BYTES[config.types.weights])
    versions = 1 if has_adapter else config.weights.keep + 1
    return Need(PUBLISHED, {f"{versions} versions": versions * size}, size)


def frozen_bytes(config: RunConfig, shape: Shape) -> int:
    """Return the bytes of the policy's weights below an adapter. In bfloat16 its linear layers are kept in
    that type, but the embedding, experts' joint weights and DeepSpeed's are not."""
    learner = config.learner
    if (
        config.types.learner != "bfloat16"
        or shape.has_experts
        or (learner.ranks > 1 and learner.backend == "deepspeed")
    ):
        return shape.num_weights * _FP32
    embedding = shape.vocabulary * shape.hidden
    return max(0, shape.num_weights - embedding) * ITEM_BYTES["bfloat16"] + embedding * _FP32


STATE_SHARE = {"adamw-8bit": 0.5, "muon": 1.0, "adafactor": 0.0}
"""Size of an optimiser's state as a share of the weights, if it is not AdamW's two moments."""


def _trained(name: str, shape: Shape, config: RunConfig, *, is_value: bool, on_cpu: bool) -> Need:
    section = config.value if is_value else config.learner
    is_whole = is_value or not config.learner.lora.rank
    weights = shape.num_weights * _FP32 if is_whole else frozen_bytes(config, shape)
    trained = weights if is_whole else 0
    state = int(trained * (2.0 if is_value else STATE_SHARE.get(config.learner.optimizer, 2.0)))
    # only the model knows how much is frozen
    stepped = 0 if config.learner.freeze and not is_value else trained + state
    recomputed = recomputed_layers((config.value if is_value else config.model).gradient_checkpointing, shape.layers)
    copied = {"copy for a checkpoint": trained + state, "process": section.ranks * PROCESS_BYTES}
    if not on_cpu:
        return Need(name, copied, stepped)
    tokens = tokens_at_once(section.micro_batch_tokens, on_cpu=True)
    logits = 0 if is_value else min(HEAD_BYTES, 3 * tokens * shape.vocabulary * _FP32)
    parts = {
        "weights": weights,
        "gradients": trained,
        "optimiser": state,
        "activations": activation_bytes(shape, tokens, recomputed),
        "logits": logits,
    }
    return Need(name, parts | copied, weights + stepped)


def _generator(shape: Shape, config: RunConfig) -> Need:
    generation = config.generation
    item = ITEM_BYTES[config.types.generator]
    if generation.engine == "vllm":
        weights, cache = shape.num_weights * item, generation.vllm.kv_cache_gb << 30
        return Need("", {"weights": weights, "KV cache": cache, "process": 4 * PROCESS_BYTES}, weights)
    tokens = generation.num_slots * (config.data.max_prompt_tokens + generation.max_response_tokens)
    shares = (
        config.weights.path != "wire"
        and config.types.generator == config.types.weights
        and not config.learner.lora.rank
    )
    weights = 0 if shares else shape.num_weights * item
    cache = tokens * shape.layers * 2 * shape.key_width * item
    return Need("", {"weights": weights, "KV cache at most": cache, "process": PROCESS_BYTES}, weights)


def _each(role: str, count: int, need: Need) -> list[Need]:
    if count == 0:
        return []
    name = role if count == 1 else f"{count} {role}s"
    one = Need(name, need.parts, need.certain)
    return [one] if count == 1 else [Need(name, {k: v * count for k, v in need.parts.items()}, need.certain * count)]


@dataclass(frozen=True, slots=True)
class Room:
    """Memory of a host, in bytes."""

    memory: int
    """All that the control group allows."""
    free: int
    shared: int | None
    """Free bytes of shared memory; None if the host has none."""


def judge(found: Iterable[Need], room: Room, *, in_shared_memory: bool) -> list[CheckFinding]:
    """Return every need, the sum, and a warning if the sum exceeds the free memory. Raises
    ConfigError if certain needs exceed the machine's memory."""
    listed = list(found)
    optional = [need for need in listed if need.is_optional]
    wanted = sum(need.num_bytes for need in listed)
    spare = room.free if room.shared is None else min(room.free, room.shared)
    standbys_too = [need for need in optional if not need.name.endswith(SNAPSHOTS)] if wanted > room.free else []
    wanted -= sum(need.num_bytes for need in standbys_too)
    kept_here = [need for need in optional if need.name.endswith(SNAPSHOTS)]
    left_out = kept_here if wanted > room.free or sum(need.num_bytes for need in kept_here) > spare else []
    left_out = [*left_out, *standbys_too]
    listed = [need for need in listed if need not in left_out]
    total, certain = sum(need.num_bytes for need in listed), sum(need.certain for need in listed)
    lines = [fine("memory", f"memory: {need.in_words()}") for need in listed if need.num_bytes]
    if certain > room.memory:
        largest = max(listed, key=lambda need: need.certain)
        raise ConfigError(
            f"the run needs {_gb(certain)} GB of memory whatever its data, most of it for the {largest.in_words()}; "
            f"this machine has {_gb(room.memory)} GB: take a smaller model, a larger machine, or an adapter (learner.lora.rank)"
        )
    lines += [
        fine(
            "memory",
            f"memory: the {need.in_words()} do not fit, so the run does without ({_BY.get(need.name, 'checkpoint.snapshots')})",
        )
        for need in left_out
    ]
    sum_up = f"memory: {_gb(total)} GB at most, {_gb(room.free)} of {_gb(room.memory)} GB are free"
    if total > room.free:
        lower = (
            "lower learner.micro_batch_tokens, generation.num_slots or the lengths, or set model.gradient_checkpointing"
        )
        lines.append(warn("memory", f"{sum_up}; this may not fit: {lower}"))
    else:
        lines.append(fine("memory", sum_up))
    kept = [need for need in listed if need.name.endswith(SNAPSHOTS) and not need.is_optional]
    if room.shared is not None and sum(need.num_bytes for need in kept) > room.shared:
        named = " and ".join(need.in_words() for need in kept)
        words = f"shared memory: {named} do not fit into the {_gb(room.shared)} GB that are free"
        lines.append(warn("shared memory", f"{words}; set checkpoint.snapshots to auto or off"))
    versions = [need for need in listed if need.name == PUBLISHED]
    if in_shared_memory and room.shared is not None and versions and versions[0].num_bytes > room.shared:
        words = f"shared memory: {versions[0].in_words()} do not fit into the {_gb(room.shared)} GB that are free"
        set_ = "set weights.shared_memory to false, or weights.dtype to bfloat16"
        lines.append(warn("shared memory", f"{words}; {set_}"))
    return lines


def shapes_of(config: RunConfig, model: Mapping[str, Any]) -> tuple[Shape, Shape | None] | None:
    """Return the shapes of the policy, whose ``config.json`` is given, and of the value model. None
    if the policy's is unknown or the learner has an engine of the user's own. Raises DataError."""
    shape = read_shape(config.model.path, model)
    if shape is None or config.learner.has_own_engine:
        return None
    path = config.value.path
    return shape, shape if path is None else read_shape(path, read_model_config(path))


def read_shape(model: Path, config: Mapping[str, Any]) -> Shape | None:
    """Return a model's shape from ``config.json`` and the headers of its weights; None if they lack it."""
    return shape_of(config, count_weights(model))


def shape_of(config: Mapping[str, Any], num_weights: int) -> Shape | None:
    """Return the shape of a model of so many weights; None if its configuration lacks a size."""
    text: Mapping[str, Any] = config.get("text_config") or config
    try:
        hidden, layers = int(text["hidden_size"]), int(text["num_hidden_layers"])
        heads = int(text["num_attention_heads"])
        head_dim = int(text.get("head_dim") or hidden // heads)
        keys = int(text.get("num_key_value_heads") or heads)
        intermediate = int(text.get("moe_intermediate_size") or text.get("intermediate_size") or 4 * hidden)
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return None
    vocabulary = int(text.get("vocab_size") or 0)
    has_experts = any(text.get(name) for name in ("num_experts", "num_local_experts", "n_routed_experts"))
    is_tied = bool(text.get("tie_word_embeddings", config.get("tie_word_embeddings")))
    shape = Shape(num_weights, layers, hidden, intermediate, keys * head_dim, vocabulary, has_experts, is_tied)
    return shape if num_weights else None


def room_here(machine: Machine, meminfo: Path = Path("/proc/meminfo"), groups: Path = CONTROL_GROUPS) -> Room:
    in_group = free_in_group(groups)
    free = machine.memory_bytes if in_group is None else min(machine.memory_bytes, in_group)
    with suppress(OSError, ValueError, IndexError):
        lines = meminfo.read_text(encoding="ascii").splitlines()
        line = next(line for line in lines if line.startswith("MemAvailable"))
        free = min(free, int(line.split()[1]) << 10)
    shared = None
    with suppress(OSError):
        stats = os.statvfs(_SHARED_MEMORY)
        shared = stats.f_bavail * stats.f_frsize
    return Room(machine.memory_bytes, free, shared)


def is_cpu(device: str, devices: Path = Path("/dev")) -> bool:
    """Return whether a device is the CPU, as far as that is known without torch."""
    return device == "cpu" or (device == "auto" and not any(devices.glob("nvidia[0-9]*")))


def count_weights(model: Path) -> int:
    """Return the number of weights in a folder's safetensors files, from their headers; 0 if
    unreadable."""
    try:
        heads = [read_head(path) for path in sorted(model.glob("*.safetensors"))]
    except (OSError, WeightsDamaged):
        return 0
    return sum(math.prod(tensor.spec.shape) for head in heads for tensor in head.tensors)


def _gb(size: int) -> str:
    return f"{size / 1e9:.1f}"
