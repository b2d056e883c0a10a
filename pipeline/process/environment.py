"""Variables of the environment that one process alone needs, and others do not inherit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

SINK_CREDENTIALS: Final = frozenset(
    {
        "WANDB_API_KEY", "MLFLOW_TRACKING_TOKEN", "MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD",
        "OTEL_EXPORTER_OTLP_HEADERS", "OTEL_EXPORTER_OTLP_TRACES_HEADERS",
    }
)  # fmt: skip
"""Of Weights & Biases and MLflow; and of a collector of traces, which workers send to."""


def without_sink_credentials(environment: Mapping[str, str], *, but: str = "none") -> dict[str, str]:
    """Return an environment without the credentials of places where metrics are written. ``but``:
    beginning of the names that stay."""
    return {name: value for name, value in environment.items() if name not in SINK_CREDENTIALS or name.startswith(but)}
