"""Checks that a run can train a LoRA adapter, before anything is started, without importing peft.

**Versions.** The extra ``lora`` declares them: merged weights are read through peft's layers, which
another version may have changed."""

from __future__ import annotations

from pipeline.config.schema import RunConfig
from pipeline.preflight.model_folder import tensor_names
from pipeline.preflight.versions import installed, require
from protocol.errors import ConfigError


def check_lora(config: RunConfig, version: str | None = None) -> list[str]:
    """Check the learner's requirements of peft, ``version`` or the installed one; return lines for
    the operator. Raises ConfigError: peft is not here, has another version, or the model lacks a
    layer."""
    lora = config.learner.lora
    if not lora.rank:
        return []
    need, instead = "learner.lora.rank is above 0", "learner.lora.rank to 0"
    version = require("peft", version or installed("peft"), "lora", need, instead)
    layers = [name.removesuffix(".weight") for name in tensor_names(config.model.path) if name.endswith(".weight")]
    for target in lora.target_modules:
        if not any(layer == target or layer.endswith(f".{target}") for layer in layers):
            raise ConfigError(
                f"learner.lora.target_modules names {target!r}, but {config.model.path} has no such layer; its layers end in "
                f"{', '.join(sorted({layer.rpartition('.')[2] for layer in layers}))}: correct it, or leave it out for all "
                "linear layers of the blocks"
            )
    targets = ", ".join(lora.target_modules) or "all linear layers of the blocks"
    return [f"learner: LoRA by peft {version}, rank {lora.rank}, alpha {lora.alpha:g}, on {targets}"]
