"""What can be known to keep ranks from training a run, before anything is started and without
importing DeepSpeed here.

*Consumes* the configuration and the names of installed packages. *Produces* lines for a person, or
one error that says what to do. *Waits for* nothing. What one setting demands of another is checked
in ``pipeline.config.schema``.

**Versions.** DeepSpeed from MIN_VERSION up to, but not including, BELOW_VERSION: besides its
documented API the learner knows where ZeRO keeps its flat shares, which another version may have
moved.
"""

from __future__ import annotations

import re
from importlib import metadata

from pipeline.config.schema import RANKED_BACKENDS, RunConfig
from protocol.errors import ConfigError

MIN_VERSION = (0, 19)
BELOW_VERSION = (0, 20)


def deepspeed_version() -> str | None:
    """Return the installed version of DeepSpeed; None when there is none."""
    try:
        return metadata.version("deepspeed")
    except metadata.PackageNotFoundError:
        return None


def check_ranks(config: RunConfig, installed: str | None = None) -> list[str]:
    """Check what learner and value worker ask of their backends; return what a person should know.

    Args:
        config: The run.
        installed: DeepSpeed's version; looked up when absent.

    Raises:
        ConfigError: DeepSpeed is asked for and not here, or in another version.
    """
    lines: list[str] = []
    sections = [("learner", config.learner), *([("value", config.value)] if config.has_critic else [])]
    for name, section in sections:
        if section.backend == "deepspeed":
            version = _check_version(f"{name}.backend", installed or deepspeed_version())
            lines.append(f"{name}: DeepSpeed {version}, ZeRO {section.deepspeed.stage}, {_ranks(section.ranks)}")
        elif section.backend in RANKED_BACKENDS:
            lines.append(f"{name}: FSDP2, {_ranks(section.ranks)}")
    return lines


def _check_version(key: str, version: str | None) -> str:
    span = f"{_dotted(MIN_VERSION)} up to, not including, {_dotted(BELOW_VERSION)}"
    if version is None:
        raise ConfigError(
            f"{key} is deepspeed, but DeepSpeed is not installed here; Headrace works with {span}: "
            f"pip install 'headrace[deepspeed]', or set {key} to fsdp2"
        )
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is None or not MIN_VERSION <= (int(numbers[1]), int(numbers[2])) < BELOW_VERSION:
        raise ConfigError(
            f"{key} is deepspeed, and DeepSpeed {version} is installed; Headrace works with {span}: install one of those, or "
            f"set {key} to fsdp2"
        )
    return version


def _ranks(number: int) -> str:
    return "1 rank" if number == 1 else f"{number} ranks"


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
