"""The sinks that need a package, and may be behind a network."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class RemoteSink:
    """A sink that has a process of its own."""

    name: str
    """Also its setting in ``[sinks]``, and its extra."""
    module: str
    """The package that its extra installs."""
    title: str

    def missing(self) -> str:
        """Return what to do when its package is not installed; "" when it is."""
        if importlib.util.find_spec(self.module) is not None:
            return ""
        return (
            f"{self.title} needs the package {self.module}, which is not installed: pip install 'headrace[{self.name}]'"
        )


REMOTE: Final[Mapping[str, RemoteSink]] = {
    "wandb": RemoteSink("wandb", "wandb", "Weights & Biases"),
    "mlflow": RemoteSink("mlflow", "mlflow", "MLflow"),
}
"""By setting."""

RUN_ENDED: Final = b"ended\n"
"""A supervisor's last word to the process of a sink; without it the run has failed."""
