"""Checks that a run can train a LoRA adapter, before anything is started, without importing peft.

**Versions.** The extra ``lora`` declares them: merged weights are read through peft's layers, which
another version may have changed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from pipeline.config.schema import RunConfig
from pipeline.preflight.model_folder import tensor_shapes
from pipeline.preflight.versions import installed, require
from protocol.errors import ConfigError

_IN_BLOCK: Final = re.compile(r"(^|\.)\d+\.")
"""A block's number in the name of a tensor of it."""


def check_lora(config: RunConfig, version: str | None = None) -> list[str]:
    """Check the learner's requirements of peft, ``version`` or the installed one; return lines for
    the operator. Raises ConfigError: peft is not here, has another version, or a target is no
    linear layer of the model's blocks."""
    lora = config.learner.lora
    if not lora.rank:
        return []
    need, instead = "learner.lora.rank is above 0", "learner.lora.rank to 0"
    version = require("peft", version or installed("peft"), "lora", need, instead)
    _check_targets(lora.target_modules, config.model.path)
    targets = ", ".join(lora.target_modules) or "all linear layers of the blocks"
    return [f"learner: LoRA by peft {version}, rank {lora.rank}, alpha {lora.alpha:g}, on {targets}"]


def _check_targets(targets: tuple[str, ...], model: Path) -> None:
    """Refuse targets that are no linear layers inside the model's blocks, and a model without any."""
    shapes = tensor_shapes(model)
    is_linear = {
        name.removesuffix(".weight"): len(shape) == 2 and _IN_BLOCK.search(name) is not None
        for name, shape in shapes.items()
        if name.endswith(".weight")
    }
    usable = sorted({layer.rpartition(".")[2] for layer, fits in is_linear.items() if fits})
    if not usable:
        raise ConfigError(
            f"learner.lora.rank is above 0, but {model} has no linear layer in a numbered block, which an adapter could be put "
            "on; expected such as model.layers.0.self_attn.q_proj.weight: set learner.lora.rank to 0"
        )
    instead = f"expected some of {', '.join(usable)}: correct it, or leave it out for all linear layers of the blocks"
    for target in targets:
        named = [fits for layer, fits in is_linear.items() if layer == target or layer.endswith(f".{target}")]
        if not named:
            raise ConfigError(f"learner.lora.target_modules names {target!r}, but {model} has no such layer; {instead}")
        if not all(named):
            raise ConfigError(
                f"learner.lora.target_modules names {target!r}, which in {model} is not only linear layers inside the blocks; "
                f"{instead}"
            )
