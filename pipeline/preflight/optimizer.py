"""Checks of the learner's optimiser before anything is started, without importing torch.

**Versions.** The extra ``bitsandbytes`` declares them: checkpoints hold the 8-bit state by its
names and shapes, which another version may have changed."""

from __future__ import annotations

from pipeline.config.schema import RunConfig
from pipeline.preflight.versions import installed, require


def check_optimizer(config: RunConfig, version: str | None = None) -> list[str]:
    """Check the optimiser's package, ``version`` or the installed one; return lines for the
    operator. Raises ConfigError: it is absent or has another version."""
    learner = config.learner
    if learner.has_own_engine:
        return []
    found = learner.optimizer
    if learner.optimizer == "adamw-8bit":
        need, instead = "learner.optimizer is adamw-8bit", "learner.optimizer to adamw-fused"
        version = require("bitsandbytes", version or installed("bitsandbytes"), "bitsandbytes", need, instead)
        found = f"adamw-8bit by bitsandbytes {version}"
    if learner.optimizer == "adamw-fused" and learner.schedule == "constant":
        return []
    return [f"learner: {found}, schedule {learner.schedule}"]
