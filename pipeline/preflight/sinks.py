"""Checks before a run starts that its metrics can be written where its configuration wants them."""

from __future__ import annotations

import importlib.util
import netrc
import os
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from pipeline.config.schema import RunConfig
from pipeline.observability.sinks.seam import REMOTE
from pipeline.preflight.findings import CheckFinding, fine, warn
from protocol.errors import ConfigError

_CHECK: Final = "sinks"
_WANDB_URL: Final = "https://api.wandb.ai"


def check_sinks(config: RunConfig) -> list[CheckFinding]:
    """Return findings about ``[sinks]``. Raises ConfigError if a package is not installed."""
    settings = config.sinks
    for name, sink in REMOTE.items():
        if getattr(settings, name) is not None and (missing := sink.missing()):
            raise ConfigError(f"sinks.{name}: {missing}, or leave sinks.{name} out")
    found: list[CheckFinding] = []
    if settings.tensorboard:
        found.append(fine(_CHECK, f"metrics: tensorboard --logdir {config.run.dir}"))
    if settings.wandb is not None:
        found.append(_wandb(config))
    if settings.mlflow is not None:
        if settings.mlflow.startswith("sqlite:") and importlib.util.find_spec("sqlalchemy") is None:
            raise ConfigError("sinks.mlflow: sqlite: needs the package sqlalchemy: pip install 'headrace[mlflow]'")
        found.append(fine(_CHECK, f"metrics: MLflow at {settings.mlflow}, experiment {settings.mlflow_experiment}"))
    return found


def _wandb(config: RunConfig) -> CheckFinding:
    mode = config.sinks.wandb_mode or os.environ.get("WANDB_MODE", "online")
    if mode == "offline":
        folder = config.run_dir / "sinks" / "wandb"
        return fine(_CHECK, f"metrics: Weights & Biases offline; wandb sync {folder}/offline-run-*")
    host = urlsplit(os.environ.get("WANDB_BASE_URL", _WANDB_URL)).hostname or ""
    if mode == "online" and not os.environ.get("WANDB_API_KEY") and not _has_entry(host):
        return warn(
            _CHECK,
            f"Weights & Biases has no key for {host}, so it takes nothing; the run goes on without it",
            do="run `wandb login`, set WANDB_API_KEY, or set sinks.wandb_mode = offline",
        )
    return fine(_CHECK, f"metrics: Weights & Biases, {config.sinks.wandb} at {host}")


def _has_entry(host: str) -> bool:
    """Return whether the file that `wandb login` writes to names a host."""
    given = os.environ.get("NETRC")
    for path in [Path(given)] if given else [Path.home() / ".netrc", Path.home() / "_netrc"]:
        try:
            if netrc.netrc(path).authenticators(host) is not None:
                return True
        except (OSError, netrc.NetrcParseError):
            continue
    return False
