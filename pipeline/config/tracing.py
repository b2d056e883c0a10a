"""The table of a run file for traces."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator

from pipeline.config.base import Section, setting


def _collector(text: str) -> str:
    try:
        parts = urlsplit(text)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname)
        is_ours = is_url and not (parts.username or parts.password or parts.query)
        has_path = bool(parts.path.strip("/"))
    except ValueError:
        is_ours = has_path = False
    if not is_ours:
        raise ValueError(
            "not a URL of a collector; expected http://HOST:PORT/v1/traces or https://..., without a name, password or "
            "query; headers with a key go into OTEL_EXPORTER_OTLP_HEADERS"
        )
    return text if has_path else f"{text.rstrip('/')}/v1/traces"


class TracingSection(Section):
    """OpenTelemetry traces, one a trajectory. A collector that is away never holds up a worker: its
    spans are lost, and the log names it once."""

    otlp: Annotated[str, AfterValidator(_collector)] | None = setting(
        None,
        "URL of a collector that takes OTLP over HTTP, such as http://127.0.0.1:4318, by `pip install 'headrace[otel]'`. "
        "Every worker sends to it. Absent: no traces.",
    )
    share: float = setting(1.0, "Share of trajectories that are traced.", gt=0.0, le=1.0)
