"""Checks that ranks can train a run, before anything is started, without importing DeepSpeed.

Conditions between settings are checked in ``pipeline.config.schema``.

**Versions.** The extra ``deepspeed`` declares them. Besides its documented API the learner depends
on the place of ZeRO's flat shares, which another version may have moved."""

from __future__ import annotations

from pipeline.config.schema import RANKED_BACKENDS, RunConfig
from pipeline.preflight.versions import declared, fits, installed, span
from protocol.errors import ConfigError


def check_ranks(config: RunConfig, version: str | None = None) -> list[str]:
    """Check the requirements of learner and value worker, with ``version`` of DeepSpeed or the
    installed one; return lines for the operator. Raises ConfigError: it is absent or has another
    version."""
    lines: list[str] = []
    sections = [("learner", config.learner), *([("value", config.value)] if config.has_critic else [])]
    for name, section in sections:
        if section.backend == "deepspeed":
            found = _check_version(f"{name}.backend", version or installed("deepspeed"))
            lines.append(f"{name}: DeepSpeed {found}, ZeRO {section.deepspeed.stage}, {_ranks(section.ranks)}")
        elif section.backend in RANKED_BACKENDS:
            lines.append(f"{name}: FSDP2, {_ranks(section.ranks)}")
    return lines


def _check_version(key: str, version: str | None) -> str:
    versions = declared("deepspeed")
    if version is None:
        raise ConfigError(
            f"{key} is deepspeed, but DeepSpeed is not installed here; Headrace works with {span(versions)}: "
            f"pip install 'headrace[deepspeed]', or set {key} to fsdp2"
        )
    if not fits(version, versions):
        raise ConfigError(
            f"{key} is deepspeed, and DeepSpeed {version} is installed; Headrace works with {span(versions)}: "
            f"install one of those, or set {key} to fsdp2"
        )
    return version


def _ranks(number: int) -> str:
    return "1 rank" if number == 1 else f"{number} ranks"
