"""The seam of a sink, a place besides the history where metrics are written: its methods, its arguments,
and the sinks that need a package and a network."""

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
    """A sink takes nothing now. Its message is a sentence with the reason, without a secret."""


class Sink(Protocol):
    """An open sink. Used by one thread. Points of updates that were given up stay in it, and the
    updates that are made in their place are left out."""

    id: str
    """The run's name at the sink, for the next opening; empty where it needs none."""

    def write(self, points: Sequence[Point]) -> None:
        """Write points. Raises SinkFailed."""
        ...

    def close(self, *, has_failed: bool) -> None:
        """Hand over all that is written; ``has_failed``: so has the run. May take as long as a
        network does. Raises SinkFailed."""
        ...


@runtime_checkable
class VoidingSink(Sink, Protocol):
    """A sink that can void written points: updates that are made again replace those that were
    given up."""

    def restart(self, axis: Axis, step: int) -> None:
        """Void what was written at ``step`` of an axis and after it. Raises SinkFailed."""
        ...


Plain = str | int | float | bool


@dataclass(frozen=True, slots=True)
class SinkSpec:
    """The arguments with which a sink is opened."""

    run_dir: Path
    run: str
    """The run's name."""
    id: str
    """The run's name at the sink, from its record; empty for one that begins."""
    settings: Mapping[str, Any]
    """The run's settings as a tree, without secrets."""

    @property
    def parameters(self) -> dict[str, Plain]:
        """The settings by key, ``section.name``. Lists are texts."""
        return dict(_flat("", self.settings))

    @property
    def settings_text(self) -> str:
        """The settings as TOML."""
        return tomli_w.dumps(self.settings)

    def setting(self, key: str) -> Any:
        """Return a setting of ``[sinks]``; None for one that is not set."""
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
