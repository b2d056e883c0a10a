"""The memory of a standby, before one has reported its own.

It holds the models of all roles that it may become. Published weights do not count: a generator
uses them where they lie. Neither do gradients, an optimiser's state and caches, which the worker
has that it replaces."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from pipeline.config.schema import RunConfig
from protocol.ids import Role

_PROCESS_BYTES = 350 << 20
"""Python, torch and transformers before any model."""
_LIGHT_BYTES = 70 << 20
_ITEM_BYTES = {"float32": 4, "bfloat16": 2}
_STORED_BYTES = 2
"""Of a weight in a file, at least: wider files make the estimate larger."""


def standby_parts(config: RunConfig, roles: Iterable[Role]) -> dict[str, int]:
    """Return the bytes of a standby's parts, by what they are for."""
    parts: dict[str, int] = {}
    for role in roles:
        match role:
            case Role.GENERATOR if config.has_sampling and not config.generation.has_own_engine:
                cache = config.generation.vllm.kv_cache_gb << 30 if config.generation.engine == "vllm" else 0
                parts["generator"] = _model(config.model.path, config.generation.dtype) + cache
            case Role.REFERENCE if not config.reference.has_own_engine:
                parts["reference"] = _model(config.reference_model, config.model.dtype)
            case Role.VALUE if not config.value.has_own_engine:
                parts["value"] = _model(config.value.path or config.model.path, "float32")
            case Role.REWARD if config.reward.model is not None:
                parts["reward model"] = _model(config.reward.model.path, "float32")
            case Role.LEARNER if not config.learner.has_own_engine:
                parts["learner"] = _model(config.model.path, "float32")
            case _:
                pass
    return {**parts, "process": _PROCESS_BYTES if parts else _LIGHT_BYTES}


def standby_bytes(config: RunConfig, roles: Iterable[Role]) -> int:
    """Return the bytes that one standby may take."""
    return sum(standby_parts(config, roles).values())


def _model(folder: Path, dtype: str) -> int:
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    return size * _ITEM_BYTES[dtype] // _STORED_BYTES
