"""Environment variables that only one process needs and others must not inherit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

SINK_CREDENTIALS: Final = frozenset(
    {
        "WANDB_API_KEY", "MLFLOW_TRACKING_TOKEN", "MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD",
        "OTEL_EXPORTER_OTLP_HEADERS", "OTEL_EXPORTER_OTLP_TRACES_HEADERS",
    }
)  # fmt: skip
"""Of Weights & Biases, MLflow, and the trace collector that workers export to."""


def without_sink_credentials(environment: Mapping[str, str], *, but: str = "none") -> dict[str, str]:
    """Return a copy of an environment without the metric sinks' credentials. Names that start with
    ``but`` stay."""
    return {name: value for name, value in environment.items() if name not in SINK_CREDENTIALS or name.startswith(but)}
