"""The arguments of a sink: the run's settings among them, flat and without secrets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import tomli_w

from pipeline.config.public import public_tree
from pipeline.observability.sinks.seam import SinkFailed

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
