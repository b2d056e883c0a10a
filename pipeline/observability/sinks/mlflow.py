"""MLflow: each run here is one run there, which a resume continues.

A write returns once the server, or the SQLite file, has answered."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from importlib import import_module
from itertools import islice
from typing import Any, Final

from pipeline.ledger.url import hide_password
from pipeline.observability.sinks.points import Point
from pipeline.observability.sinks.seam import SinkFailed, SinkSpec

_MAX_METRICS: Final = 1000
_MAX_PARAMETERS: Final = 100
_MAX_CHARS: Final = 500
"""Limits of one request, set by MLflow's API."""
_QUIET: Final = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
}
"""Our defaults for MLflow's environment variables: no telemetry, and failures that come soon."""


class MlflowSink:
    def __init__(self, spec: SinkSpec) -> None:
        """Begin or continue the run. Raises SinkFailed."""
        for name, value in _QUIET.items():
            os.environ.setdefault(name, value)
        try:
            self._entities: Any = import_module("mlflow.entities")
            self._client: Any = import_module("mlflow.tracking").MlflowClient(tracking_uri=spec.setting("mlflow"))
            self.id = spec.id or self._created(spec)
            if spec.id:
                self._client.update_run(self.id, status="RUNNING")
        except Exception as error:
            raise SinkFailed(_reason(error)) from error

    def write(self, points: Sequence[Point]) -> None:
        metrics = self._metrics(points)
        try:
            while some := list(islice(metrics, _MAX_METRICS)):
                self._client.log_batch(self.id, metrics=some)
        except Exception as error:
            raise SinkFailed(_reason(error)) from error

    def close(self, *, has_failed: bool) -> None:
        try:
            self._client.set_terminated(self.id, "FAILED" if has_failed else "FINISHED")
        except Exception as error:
            raise SinkFailed(_reason(error)) from error

    def _created(self, spec: SinkSpec) -> str:
        name = str(spec.setting("mlflow_experiment"))
        experiment = self._client.get_experiment_by_name(name)
        number = self._client.create_experiment(name) if experiment is None else experiment.experiment_id
        made = str(self._client.create_run(number, run_name=spec.run).info.run_id)
        given = ((key, str(value)[:_MAX_CHARS]) for key, value in spec.parameters.items())
        while some := [self._entities.Param(*one) for one in islice(given, _MAX_PARAMETERS)]:
            self._client.log_batch(made, params=some)
        return made

    def _metrics(self, points: Sequence[Point]) -> Iterator[Any]:
        for point in points:
            for name, value in point.values.items():
                yield self._entities.Metric(name.replace("@", "_at_"), value, int(1000 * point.at_s), point.step)


def _reason(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"MLflow: {hide_password(lines[0]) if lines else type(error).__name__}"
