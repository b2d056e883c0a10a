"""Weights & Biases: each run here is one run there, which a resume continues.

The client's own service process sends what is logged and keeps it through an outage. Offline, the run is
in ``<run_dir>/sinks/wandb``. Only what Headrace writes is sent: no console output, code, git remote or
system metrics."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any, Final

from pipeline.ledger.url import hide_password
from pipeline.observability.sinks.points import Axis, Point
from pipeline.observability.sinks.pump import FOLDER
from pipeline.observability.sinks.seam import SinkFailed, SinkSpec

_INIT_S: Final = 60.0
_GROUPS: Final = {
    Axis.UPDATE: ("train/*", "reward/*", "objective/*", "staleness/*", "time/*", "eval/*"),
    Axis.VALUE: ("value/*",),
    Axis.FLEET: ("fleet/*",),
}
"""By axis, the figures that are plotted over it."""


class WandbSink:
    def __init__(self, spec: SinkSpec) -> None:
        """Begin or continue the run. Raises SinkFailed: no network, no login, no such entity."""
        wandb: Any = import_module("wandb")
        entity, _, project = str(spec.setting("wandb")).rpartition("/")
        self.id = spec.id or f"{spec.run}-{secrets.token_hex(4)}"
        folder = spec.run_dir / FOLDER
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        settings = wandb.Settings(
            console="off",
            disable_code=True,
            disable_git=True,
            init_timeout=_INIT_S,
            silent=True,
            x_disable_stats=True,
        )
        try:
            self._run: Any = wandb.init(
                project=project,
                entity=entity or None,
                id=self.id,
                name=spec.run,
                dir=folder,
                mode=spec.setting("wandb_mode"),
                resume="allow",
                settings=settings,
            )
            self._run.config.update(spec.parameters, allow_val_change=True)
            for axis, groups in _GROUPS.items():
                self._run.define_metric(str(axis), hidden=True)
                for group in groups:
                    self._run.define_metric(group, step_metric=str(axis))
        except Exception as error:
            # The client keeps process-wide state, which would break a second call.
            with suppress(Exception):
                wandb.teardown(exit_code=1)
            raise SinkFailed(_reason("Weights & Biases", error)) from error

    def write(self, points: Sequence[Point]) -> None:
        """Hand points to the client, which sends them. Raises SinkFailed."""
        try:
            for point in points:
                self._run.log({**point.values, str(point.axis): point.step, "at_s": point.at_s})
        except Exception as error:
            raise SinkFailed(_reason("Weights & Biases", error)) from error

    def close(self, *, has_failed: bool) -> None:
        """Wait until everything is sent, and end the run. Raises SinkFailed."""
        try:
            self._run.finish(exit_code=int(has_failed))
        except Exception as error:
            raise SinkFailed(_reason("Weights & Biases", error)) from error


def _reason(title: str, error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{title}: {hide_password(lines[0]) if lines else type(error).__name__}"
