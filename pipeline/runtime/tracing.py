"""OpenTelemetry traces: one per trajectory, with a span for each piece of work on it.

    sample    by a generator: one window, from its submission until the ledger has the chunk
    reward, reference, value, guidance    by a scorer: from the chunk's arrival until the ledger has
              its field
    train     by the learner: from the claim until the new weights are published

The first window's span is the root. A window's context travels in the envelope of its chunk, so a scorer's
span is its child. Trace and root ids are digests of run and trajectory, so a span of any worker belongs to its
trace, even if a generator died or the chunk came from the ledger. Spans contain names, counts and versions,
but no text of prompts or responses.

*Consumes* the records of messages and windows that have ended. *Produces* spans for a collector, sent over OTLP by
the SDK's thread, which drops those that a collector does not take in time. *Waits for* nothing except the last
spans when the worker ends, with a deadline."""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import re
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from structlog.typing import FilteringBoundLogger

from pipeline.config.operations import TracingSection
from pipeline.runtime.message_record import MessageOutcome, MessageRecord
from protocol.errors import ConfigError
from protocol.ids import Incarnation, TrajectoryId

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter

_TRACEPARENT: Final = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-01")
"""A sampled span's context: https://www.w3.org/TR/trace-context/."""
SAMPLE: Final = "sample"
_EXPORT_S: Final = 5.0
_SHARES: Final = 1 << 64


def missing_package() -> str:
    """Return the command that installs the packages for tracing; empty if they are installed."""
    names = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")
    try:
        is_whole = all(importlib.util.find_spec(name) is not None for name in names)
    except ModuleNotFoundError:
        is_whole = False
    return "" if is_whole else "pip install 'headrace[otel]'"


def check_tracing(settings: TracingSection) -> None:
    if settings.otlp is not None and (command := missing_package()):
        raise ConfigError(f"tracing.otlp needs OpenTelemetry on every host: {command}, or leave tracing.otlp out")


def open_spans(
    settings: TracingSection, run: str, who: Incarnation, log: FilteringBoundLogger
) -> TrajectorySpans | None:
    """Return a worker's spans; None without ``tracing.otlp``. Raises ConfigError when a package is missing."""
    if settings.otlp is None:
        return None
    check_tracing(settings)
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    # its thread logs every failed call; ours only the first
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
    exporter = _told(OTLPSpanExporter(endpoint=settings.otlp, timeout=_EXPORT_S), settings.otlp, log)
    return TrajectorySpans(exporter, run, who, share=settings.share)


class TrajectorySpans:
    """The spans of one worker, made with OpenTelemetry's SDK. Used by one event loop."""

    def __init__(self, exporter: SpanExporter, run: str, who: Incarnation, *, share: float = 1.0) -> None:
        """``share`` of the trajectories is traced, the same ones in every worker."""
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
        from opentelemetry.sdk.trace.sampling import ALWAYS_ON

        class Ids(RandomIdGenerator):
            """Random, except for a root, whose ids are given."""

            given: tuple[int, int] | None = None

            def generate_trace_id(self) -> int:
                return self.given[0] if self.given else super().generate_trace_id()

            def generate_span_id(self) -> int:
                return self.given[1] if self.given else super().generate_span_id()

        self._ids, self._run, self._limit = Ids(), run, int(share * _SHARES)
        resource = Resource.create(
            {"service.name": f"headrace-{who.role}", "service.instance.id": str(who), "headrace.run": run}
        )
        provider = TracerProvider(ALWAYS_ON, resource, shutdown_on_exit=False, id_generator=self._ids)
        self._processor = BatchSpanProcessor(exporter, export_timeout_millis=1000 * _EXPORT_S)
        provider.add_span_processor(self._processor)
        self._tracer = provider.get_tracer("headrace")

    def add(self, record: MessageRecord) -> str:
        """Make the span of a record that has ended, and return its context; empty if it has none."""
        from opentelemetry.context import Context
        from opentelemetry.trace import Status, StatusCode

        chunk = record.chunk
        if chunk is None or not record.span or not (record.outcome is MessageOutcome.STORED or record.error):
            return ""
        trace, root = root_ids(self._run, chunk.trajectory)
        if trace % _SHARES >= self._limit:
            return ""
        is_root, now_ns = record.span == SAMPLE and chunk.index == 0, time.time_ns()
        self._ids.given = (trace, root) if is_root else None
        try:
            span = self._tracer.start_span(
                record.span,
                Context() if is_root else _child_of(trace, root, record.trace),
                start_time=now_ns - round(1e9 * (record.ended_s - record.taken_s)),
                attributes={
                    "headrace.trajectory": str(chunk.trajectory),
                    **{f"headrace.{name}": fact for name, fact in record.facts.items()},
                },
            )
        finally:
            self._ids.given = None
        if record.error:
            span.set_status(Status(StatusCode.ERROR, record.error))
        span.end(now_ns)
        return f"00-{trace:032x}-{span.get_span_context().span_id:016x}-01"

    def close(self, timeout_s: float) -> None:
        """Send the remaining spans, within the time limit."""
        # the SDK's own shutdown waits for an absent collector as long as one call may take
        ending = threading.Thread(target=self._processor.shutdown, name="spans", daemon=True)
        ending.start()
        ending.join(timeout_s)


def root_ids(run: str, trajectory: TrajectoryId) -> tuple[int, int]:
    """Return a trajectory's trace id (128 bits) and its root's span id (64 bits)."""
    digest = hashlib.sha256(f"{run}/{trajectory}".encode()).digest()
    return int.from_bytes(digest[:16], "big"), int.from_bytes(digest[16:24], "big")


def _child_of(trace: int, root: int, parent: str) -> Any:
    from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, set_span_in_context

    found = _TRACEPARENT.fullmatch(parent)
    # a context of another trace does not come from a worker of this run
    span = int(found[2], 16) if found is not None and int(found[1], 16) == trace else root
    context = SpanContext(trace, span or root, is_remote=True, trace_flags=TraceFlags(TraceFlags.SAMPLED))
    return set_span_in_context(NonRecordingSpan(context))


def _told(exporter: SpanExporter, url: str, log: FilteringBoundLogger) -> SpanExporter:
    """Return an exporter that logs the first failed call, and the first successful one after it."""
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

    class Told(SpanExporter):
        is_away = False

        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            result = exporter.export(spans)
            is_away = result is not SpanExportResult.SUCCESS
            if is_away and not self.is_away:
                log.warning("spans_not_sent", url=url, num_spans=len(spans), effect="the run goes on without them")
            elif self.is_away and not is_away:
                log.info("spans_sent_again", url=url)
            self.is_away = is_away
            return result

        def shutdown(self) -> None:
            exporter.shutdown()

        def force_flush(self, timeout_millis: int = 30_000) -> bool:
            return exporter.force_flush(timeout_millis)

    return Told()
