"""Parts that a standby made before it became a worker: engines with models, prompts, weights.

Each part is taken once, by its name. Parts made for other settings than the worker's are not used; the worker
makes its own. Settings that may change during a run do not affect parts, since a worker applies them when it
starts."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from typing import Any

from pipeline.config.changing import differ_in_changeable_alone
from pipeline.config.schema import RunConfig


class PreparedParts:
    """Parts of a future worker, by name."""

    def __init__(self, config: RunConfig | None = None, parts: Mapping[str, Any] | None = None) -> None:
        """``config`` is the configuration for which the parts were made."""
        self._config = config
        self._parts = dict(parts or {})

    def fits(self, config: RunConfig) -> bool:
        """Return whether the parts were made for this configuration."""
        return self._config is not None and differ_in_changeable_alone(self._config, config)

    def take(self, name: str) -> Any | None:
        """Return a part and forget it; None if there is none."""
        return self._parts.pop(name, None)

    def release(self) -> None:
        """Close the parts that were not taken and free their memory; their processes end. Errors in closing
        are raised once all are closed."""
        parts, self._parts = self._parts, {}
        if not parts:
            return
        try:
            _close(parts.values())
        finally:
            # an engine may refer to itself; collect before gc.freeze counts these objects as permanent
            parts.clear()
            gc.collect()


def _close(parts: Iterable[Any]) -> None:
    with ExitStack() as closing:
        for part in parts:
            if (close := getattr(part, "close", None)) is not None:
                closing.callback(close)
