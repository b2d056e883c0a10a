"""The parts that a standby made before it became a worker: engines with models, prompts, weights.

Each part is taken once, by the name of its maker. Parts of other settings than the worker's are not
taken, and the worker makes its own. Settings that may change while a run goes on decide no part: a
worker sets them when it starts. So the parts fit whatever their values were."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from typing import Any

from pipeline.config.changing import differ_in_changeable_alone
from pipeline.config.schema import RunConfig


class PreparedParts:
    """Parts of one worker to be, by name."""

    def __init__(self, config: RunConfig | None = None, parts: Mapping[str, Any] | None = None) -> None:
        """``config``: by which the parts were made."""
        self._config = config
        self._parts = dict(parts or {})

    def fits(self, config: RunConfig) -> bool:
        """Return whether the parts are those of this configuration."""
        return self._config is not None and differ_in_changeable_alone(self._config, config)

    def take(self, name: str) -> Any | None:
        """Return a part, and give it away; None without one."""
        return self._parts.pop(name, None)

    def release(self) -> None:
        """Close the parts that were not taken, and let go of them: their memory is free, and their
        processes end. Errors of closing are raised once all are closed."""
        parts, self._parts = self._parts, {}
        if not parts:
            return
        try:
            _close(parts.values())
        finally:
            # an engine may refer to itself; later these objects would count as lasting ones
            parts.clear()
            gc.collect()


def _close(parts: Iterable[Any]) -> None:
    with ExitStack() as closing:
        for part in parts:
            if (close := getattr(part, "close", None)) is not None:
                closing.callback(close)
