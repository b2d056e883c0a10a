"""Checks that our own engines can compute a run's models, without importing torch here.

Known types of models on the CPU need no check. For all others ``workers.engines.check`` makes a
trial pass in a subprocess, since only torch finds devices, and only a pass shows whether an
architecture can be computed."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from pipeline.config.import_path import is_import_path
from pipeline.config.schema import RunConfig
from pipeline.preflight.ask import ask
from pipeline.preflight.model_folder import read_model_config
from pipeline.preflight.passed import PassedCheck
from protocol.errors import ConfigError

KNOWN = frozenset({"gemma", "llama", "mistral", "qwen2", "qwen3"})
"""Types of models that all our engines can compute. A test makes the trial pass with each."""

_ASK_S = 300.0
"""Longest wait for the trial passes, which take some seconds, mostly torch's import."""


def check_engines(config: RunConfig, *, asks_again: bool = False) -> list[str]:
    """Return sentences about the trial passes, if any were needed. ``asks_again`` repeats passes that
    succeeded before. Raises ConfigError if a device is absent, or an engine cannot compute a model of
    the run."""
    _check_own(config)
    names = _uncertain(config)
    if not names:
        return []
    passed = PassedCheck("workers.engines.check", config)
    if not asks_again and (notes := passed.notes()) is not None:
        return _findings(names, notes)
    try:
        answer = ask("workers.engines.check", config, timeout_s=_ASK_S)
    except TimeoutError as error:
        late = f"the trial pass of {', '.join(names)} did not end: {error}"
        raise ConfigError(f"{late}; try again when the machine is less busy") from None
    if answer.refusal is not None:
        raise ConfigError(answer.refusal)
    passed.remember(answer.notes)
    return _findings(names, answer.notes)


def _findings(names: list[str], notes: str) -> list[str]:
    return [
        f"engines: {', '.join(names)} can be computed here (trial pass)",
        *(f"engines: {note}" for note in notes.splitlines()),
    ]


def _check_own(config: RunConfig) -> None:
    """Raise ConfigError for an engine of the user's own whose package does not exist. Its module
    may import torch, so only its worker imports it."""
    engines = {
        "generation.engine": config.generation.engine,
        "learner.backend": config.learner.backend,
        "reference.backend": config.reference.backend,
        "value.backend": config.value.backend,
    }
    for setting, name in engines.items():
        package = name.partition(":")[0].partition(".")[0]
        if is_import_path(name) and find_spec(package) is None:
            raise ConfigError(
                f"{setting} is {name!r}, but there is no package {package!r}; install it, or name its folder in algorithm.path"
            )


def _uncertain(config: RunConfig) -> list[str]:
    """Return what needs a trial pass: named devices, unknown types of models, and own objectives."""
    found: list[str] = []
    if not config.learner.has_own_engine:
        folders = [config.model.path]
        if config.has_reference and config.reference.backend == "torch":
            folders.append(config.reference_model)
        if config.has_critic and config.value.path is not None:
            folders.append(config.value.path)
        types: list[Any] = [read_model_config(folder).get("model_type") for folder in folders]
        found += [str(kind) for kind in types if kind not in KNOWN]
        if config.learner.freeze or config.learner.no_decay:
            # only the model knows the names of its parameters
            found += [str(types[0])]
        found += filter(is_import_path, (config.algorithm.name, config.algorithm.loss_aggregation))
    devices = [config.model.device, config.generation.device, config.reference.device, config.value.device]
    if config.reward.model is not None:
        devices.append(config.reward.model.device)
    return sorted({*found, *(device for device in devices if device not in ("auto", "cpu"))})
