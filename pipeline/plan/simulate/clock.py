"""Simulated time. The only place that imports simpy."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

from protocol.errors import ConfigError

Process = Generator[Any, Any, None]
"""Yields what :meth:`Clock.sleep` returns."""


class Clock:
    """Raises ConfigError if simpy is not installed."""

    def __init__(self) -> None:
        try:
            import simpy
        except ImportError:
            raise ConfigError("simulation needs simpy, which is not installed: pip install 'headrace[plan]'") from None
        self._env = simpy.Environment()

    @property
    def now(self) -> float:
        return self._env.now

    def sleep(self, seconds: float) -> Any:
        """Return what a process yields to wait."""
        return self._env.timeout(max(0.0, seconds))

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        """Call something at a later time."""
        event: Any = self._env.timeout(max(0.0, seconds))
        event.callbacks.append(lambda _: call())

    def start(self, process: Process) -> Any:
        return self._env.process(process)

    def run(self, until: Any) -> None:
        """Let time pass until a process has ended, or nothing more happens."""
        self._env.run(until)
