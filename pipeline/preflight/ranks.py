"""Checks that ranks can train a run, before anything is started, without importing DeepSpeed.

**Versions.** The extra ``deepspeed`` declares them. Besides its documented API the learner depends
on the place of ZeRO's flat shares, which another version may have moved."""

from __future__ import annotations

from pipeline.config.schema import RANKED_BACKENDS, RunConfig
from pipeline.preflight.versions import installed, require


def check_ranks(config: RunConfig, version: str | None = None) -> list[str]:
    """Check the requirements of learner and value worker, with ``version`` of DeepSpeed or the
    installed one; return lines for the operator. Raises ConfigError: it is absent or has another
    version."""
    lines: list[str] = []
    sections = [("learner", config.learner), *([("value", config.value)] if config.has_critic else [])]
    for name, section in sections:
        if section.backend == "deepspeed":
            need, instead = f"{name}.backend is deepspeed", f"{name}.backend to fsdp2"
            given, change = version or installed("deepspeed"), "install one of those"
            found = require("DeepSpeed", given, "deepspeed", need, instead, to_change=change)
            lines.append(f"{name}: DeepSpeed {found}, ZeRO {section.deepspeed.stage}, {_ranks(section.ranks)}")
        elif section.backend in RANKED_BACKENDS:
            lines.append(f"{name}: FSDP2, {_ranks(section.ranks)}")
    return lines


def _ranks(number: int) -> str:
    return "1 rank" if number == 1 else f"{number} ranks"
