"""The interface of a sink, the arguments it is opened with, and the sinks that need a package and a
network."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol, cast, runtime_checkable

import tomli_w

from pipeline.config.public import public_tree
from pipeline.observability.sinks.points import Axis, Point


class SinkFailed(Exception):
    """A sink accepts nothing now. The message is a sentence with the reason, without secrets."""


class Sink(Protocol):
    """An open sink, used by one thread. Points of updates that were taken back stay in it; the updates made
    in their place are left out."""

    id: str
    """The run's id at the sink, for reopening it; empty if it needs none."""

    def write(self, points: Sequence[Point]) -> None:
        """Write points. Raises SinkFailed."""
        ...

    def close(self, *, has_failed: bool) -> None:
        """Flush everything and close; ``has_failed`` says whether the run did. May take as long as the
        network does. Raises SinkFailed."""
        ...


@runtime_checkable
class VoidingSink(Sink, Protocol):
    """A sink that can void points, so that repeated updates replace those that were taken back."""

    def restart(self, axis: Axis, step: int) -> None:
        """Void what was written to an axis from ``step`` on. Raises SinkFailed."""
        ...


Plain = str | int | float | bool


@dataclass(frozen=True, slots=True)
class SinkSpec:
    """What a sink is opened with."""

    run_dir: Path
    run: str
    id: str
    """The run's id at the sink, from its record; empty for a new run."""
    settings: Mapping[str, Any]
    """The run's settings as a tree, without secrets."""

    @property
    def parameters(self) -> dict[str, Plain]:
        """The settings as ``section.name`` -> value; lists become text."""
        return dict(_flat("", self.settings))

    @property
    def settings_text(self) -> str:
        """The settings as TOML."""
        return tomli_w.dumps(self.settings)

    def setting(self, key: str) -> Any:
        """Return a setting of ``[sinks]``, or None if it is not set."""
        return self.settings.get("sinks", {}).get(key)


def spec_of(run_dir: Path, sink_id: str) -> SinkSpec:
    """Return what a run's sink is opened with. Raises SinkFailed."""
    try:
        tree = public_tree(run_dir)
        return SinkSpec(run_dir, str(tree["run"]["name"]), sink_id, tree)
    except (OSError, ValueError, KeyError) as error:
        raise SinkFailed(f"the run's settings cannot be read: {error}") from error


def _flat(prefix: str, tree: Mapping[str, Any]) -> Iterator[tuple[str, Plain]]:
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from _flat(f"{prefix}{name}.", cast("dict[str, Any]", value))
        else:
            yield f"{prefix}{name}", value if isinstance(value, Plain) else str(value)


@dataclass(frozen=True, slots=True)
class RemoteSink:
    """A sink that runs in its own process."""

    name: str
    """Also the name of its setting in ``[sinks]`` and of its extra."""
    module: str
    """The package that its extra installs."""
    title: str

    def missing(self) -> str:
        """Return what to do if its package is not installed; "" if it is."""
        if importlib.util.find_spec(self.module) is not None:
            return ""
        return (
            f"{self.title} needs the package {self.module}, which is not installed: pip install 'headrace[{self.name}]'"
        )


REMOTE: Final[Mapping[str, RemoteSink]] = {
    "wandb": RemoteSink("wandb", "wandb", "Weights & Biases"),
    "mlflow": RemoteSink("mlflow", "mlflow", "MLflow"),
}
"""By the name of the setting."""

RUN_ENDED: Final = b"ended\n"
"""A supervisor's last word to the process of a sink; without it, the run has failed."""
