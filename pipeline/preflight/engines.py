"""What can be known to keep our own engines from computing a run, before anything is started and
without importing torch here.

*Consumes* the configuration and its models' ``config.json``. *Produces* a line for a person, or one
error that says what to do. *Waits for* ``workers.engines.check`` in a process of its own, where the
answer is not known beforehand: torch alone sees devices, and only a trial pass shows whether an
architecture can be packed.
"""

from __future__ import annotations

from typing import Any

from pipeline.config.schema import RunConfig
from pipeline.preflight.ask import ask
from pipeline.preflight.model_folder import read_model_config
from protocol.errors import ConfigError

KNOWN = frozenset({"gemma", "llama", "mistral", "qwen2", "qwen3"})
"""Types of models that every engine of ours computes; a test puts each through the trial pass."""

_ASK_S = 300.0
"""Longest wait for the trial passes; they take some seconds, most of them torch's import."""


def check_engines(config: RunConfig) -> str | None:
    """Return a sentence when a trial pass was made; None when nothing had to be asked.

    Raises:
        ConfigError: A device is not here, or an engine cannot compute a model of the run.
    """
    names = _uncertain(config)
    if not names:
        return None
    try:
        reason = ask("workers.engines.check", config, timeout_s=_ASK_S)
    except TimeoutError as error:
        raise ConfigError(
            f"whether our engines can compute {', '.join(names)} was not found out: {error}; try again with less to do besides"
        ) from None
    if reason is not None:
        raise ConfigError(reason)
    return f"engines: {', '.join(names)} can be computed here (trial pass without weights)"


def _uncertain(config: RunConfig) -> list[str]:
    """Return what has to be asked for: devices that are named, and types of models that are not
    known.
    """
    found: list[str] = []
    if config.learner.backend != "emulated":
        folders = [config.model.path]
        if config.needs_reference and config.reference.backend == "torch":
            folders.append(config.reference_model)
        if config.has_critic and config.value.path is not None:
            folders.append(config.value.path)
        types: list[Any] = [read_model_config(folder).get("model_type") for folder in folders]
        found += [str(kind) for kind in types if kind not in KNOWN]
    devices = [config.model.device, config.generation.device, config.reference.device, config.value.device]
    if config.reward.model is not None:
        devices.append(config.reward.model.device)
    return sorted({*found, *(device for device in devices if device not in ("auto", "cpu"))})
