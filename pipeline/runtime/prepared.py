"""The parts that a standby made before it became a worker: engines with models, prompts, weights.

Each part is taken once, by the name of its maker. Parts of other settings than the worker's are not
taken, and the worker makes its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeline.config.schema import RunConfig


class PreparedParts:
    """Parts of one worker to be, by name."""

    def __init__(self, config: RunConfig | None = None, parts: Mapping[str, Any] | None = None) -> None:
        """``config``: by which the parts were made."""
        self._config = config
        self._parts = dict(parts or {})

    def fits(self, config: RunConfig) -> bool:
        """Return whether the parts are those of this configuration."""
        return self._config == config

    def take(self, name: str) -> Any | None:
        """Return a part, and give it away; None without one."""
        return self._parts.pop(name, None)
