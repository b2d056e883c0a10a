"""Traces of trajectories: one update of real workers over Redis and ZeroMQ, and a collector that
takes what they send."""

from __future__ import annotations

import asyncio
import http.server
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, ClassVar, cast

import pytest
import structlog
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from structlog.testing import capture_logs
from structlog.typing import FilteringBoundLogger

from pipeline.config.operations import TracingSection
from pipeline.ledger.redis.client import connect
from pipeline.ledger.redis.ledger import RedisLedger
from pipeline.ledger.types import ClaimedUnit, ScoredChunk
from pipeline.preflight.checks import diagnose
from pipeline.runtime import tracing
from pipeline.runtime.actor import Actor
from pipeline.runtime.clock import RealClock
from pipeline.runtime.context import ActorContext
from pipeline.runtime.flow_ring import FlowRingReader, FlowRingWriter
from pipeline.runtime.message_record import MessageOutcome, MessageRecord, key_of
from pipeline.runtime.open_messages import FlowRecorder, Inbox
from pipeline.runtime.registry.redis import RedisRegistry
from pipeline.runtime.tracing import TrajectorySpans, open_spans, root_ids
from pipeline.supervisor.leftovers import clear_leftovers
from protocol.channel import LinkStats
from protocol.codec import decode, encode, encode_once
from protocol.ids import ChunkId, Incarnation, Role, TrajectoryId
from tests.manual_clock import ManualClock
from tests.pipeline.ledger.builders import make_chunk
from tests.pipeline.runtime.ring_records import Ended, read
from tests.protocol.samples import chunk
from tests.small_run import small_run
from tests.transports import zmq_transport
from workers.generator.generator import Generator
from workers.learner.claims import ClaimedChunks
from workers.learner.learner import Learner
from workers.scorers.reward import Reward

WHO = Incarnation(Role.GENERATOR, "generator-0", 1)
FIRST = TrajectoryId("t", 0, 0)
CHUNK = ChunkId(FIRST, 0)
LOG = cast("FilteringBoundLogger", structlog.get_logger("traces"))
LIMIT_S = 60.0


def ended(
    span: str = "reward", chunk: ChunkId = CHUNK, *, trace: str = "", error: str = "", **facts: Any
) -> MessageRecord:
    """A message that has ended after 2 seconds, with a result unless it has an error."""
    record = MessageRecord(chunk, 10.0, span=span, facts=facts, trace=trace)
    record.ended_s, record.error = 12.0, error
    record.outcome = MessageOutcome.UNSTORED if error else MessageOutcome.STORED
    return record


def spans_of(exporter: InMemorySpanExporter, **settings: Any) -> TrajectorySpans:
    return TrajectorySpans(exporter, "run", WHO, **settings)


def made(spans: TrajectorySpans, exporter: InMemorySpanExporter) -> list[ReadableSpan]:
    spans.close(5.0)
    return list(exporter.get_finished_spans())


async def update_with_spans(folder: Path, server: str) -> list[Any]:
    """Make one update with a generator, a reward worker and a learner; return all spans."""
    exporters, spans = list[InMemorySpanExporter](), list[TrajectorySpans]()
    config, contexts, actors = small_run(folder), list[ActorContext](), list[Actor]()

    async def begin(kind: type[Actor], tasks: asyncio.TaskGroup) -> Actor:
        registry = RedisRegistry(connect(server), "walk")
        exporters.append(InMemorySpanExporter())
        who = await registry.register(kind.role, f"{kind.role}-0")
        spans.append(TrajectorySpans(exporters[-1], "run", who))
        ctx = ActorContext(
            config=config, run_dir=folder / "run", who=who, ledger=RedisLedger(connect(server), "walk"),
            registry=registry, transport=zmq_transport(str(who), high_water_mark=16), log=LOG, clock=RealClock(),
            tasks=tasks, spans=spans[-1],
        )  # fmt: skip
        contexts.append(ctx)
        actors.append(kind(ctx))
        ctx.spawn("news", ctx.notifications.watch())
        return actors[-1]

    (folder / "run").mkdir()
    try:
        async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as tasks:
            started = [await begin(kind, tasks) for kind in (Reward, Learner, Generator)]
            for actor in started:
                await actor.setup()
            reward, learner, generator = [tasks.create_task(actor.run()) for actor in started]
            await learner
            for ctx in contexts:
                ctx.draining.set()
            await asyncio.wait([reward, generator])
            for ctx in contexts:
                await ctx.cancel_spawned()
    finally:
        for actor in actors:
            await actor.teardown()
        for one in spans:
            one.close(5.0)
        for ctx in contexts:
            ctx.close()
            await ctx.ledger.aclose()
            await ctx.registry.aclose()
        clear_leftovers(folder / "run")
    return [span for exporter in exporters for span in exporter.get_finished_spans()]


async def test_each_trajectory_is_one_trace_from_its_first_window_to_its_update(
    tmp_path: Path, redis_server: str
) -> None:
    traces: dict[int, list[Any]] = {}
    for span in await update_with_spans(tmp_path, redis_server):
        traces.setdefault(span.context.trace_id, []).append(span)
    trained = {trace: spans for trace, spans in traces.items() if any(span.name == "train" for span in spans)}
    assert len(trained) >= 8
    for trace, spans in trained.items():
        facts = {span.attributes["headrace.trajectory"] for span in spans}
        (name,) = facts
        first, *later = sorted((span for span in spans if span.name == "sample"), key=lambda span: span.start_time)
        assert first.parent is None and (trace, first.context.span_id) == root_ids("run", TrajectoryId.parse(name))
        (reward,) = [span for span in spans if span.name == "reward"]
        (train,) = [span for span in spans if span.name == "train"]
        assert {span.parent.span_id for span in (*later, train)} == {first.context.span_id}
        # by the context in the envelope: of the window that it scored
        (scored,) = [
            s for s in (first, *later) if s.attributes["headrace.chunk"] == reward.attributes["headrace.chunk"]
        ]
        assert reward.parent.span_id == scored.context.span_id
        assert not [fact for span in spans for fact in span.attributes.values() if "+" in str(fact)], "a prompt's text"
        assert first.start_time <= first.end_time <= train.start_time <= train.end_time
        assert scored.start_time <= reward.start_time <= reward.end_time
        assert train.end_time - first.start_time < LIMIT_S * 1e9
        assert {span.resource.attributes["service.name"] for span in spans} == {
            "headrace-generator", "headrace-reward", "headrace-learner"
        }  # fmt: skip


def test_the_envelope_carries_a_context_and_without_tracing_not_even_its_name() -> None:
    frames = encode(chunk(), sender="generator-0", sequence=0, sent_s=1.0)
    assert b"trace" not in bytes(frames[0])
    encoded = encode_once(chunk())
    context = f"00-{1:032x}-{2:016x}-01"
    with_context = type(encoded)(encoded.tag, encoded.body, encoded.checksum, trace=context)
    sent = encode(with_context, sender="generator-0", sequence=0, sent_s=1.0)
    assert decode(sent, max_bytes=1 << 20)[1].trace == context
    assert decode(frames, max_bytes=1 << 20)[1].trace == ""


@pytest.mark.parametrize(
    "parent", ["", "no context", f"00-{7:032x}-{9:016x}-01", "00-" + "0" * 32 + "-" + "0" * 16 + "-01"]
)
def test_a_context_that_is_not_of_the_trajectorys_trace_is_not_followed(parent: str) -> None:
    exporter = InMemorySpanExporter()
    spans = spans_of(exporter)
    spans.add(ended(trace=parent))
    (span,) = made(spans, exporter)
    assert (span.context.trace_id, span.parent.span_id) == root_ids("run", FIRST)  # type: ignore[union-attr]


def test_a_failure_is_an_error_of_its_span() -> None:
    exporter = InMemorySpanExporter()
    spans = spans_of(exporter)
    assert spans.add(ended(error="no verdict"))
    (span,) = made(spans, exporter)
    assert (span.status.is_ok, span.status.description) == (False, "no verdict")
    assert span.end_time - span.start_time == 2_000_000_000  # type: ignore[operator]


def test_what_ends_without_a_result_and_what_names_no_span_has_none() -> None:
    exporter = InMemorySpanExporter()
    spans, postponed = spans_of(exporter), ended()
    postponed.outcome = MessageOutcome.UNSTORED
    assert [spans.add(one) for one in (postponed, ended(span=""))] == ["", ""]
    assert made(spans, exporter) == []


async def test_a_trajectory_has_one_span_of_an_update_unless_its_unit_was_dropped() -> None:
    exporter, clock = InMemorySpanExporter(), ManualClock()
    flow = FlowRecorder(clock, spans=(spans := spans_of(exporter)))
    chunks = ClaimedChunks("learner", clock, flow)
    kept, dropped = TrajectoryId("t", 1, 0), TrajectoryId("t", 2, 0)
    units = [
        ClaimedUnit(str(one.group), (tuple(ScoredChunk(make_chunk(one, index), {}) for index in range(3)),))
        for one in (kept, dropped)
    ]
    chunks.claimed(units, 5, 6)
    await clock.advance(1.0)
    chunks.published({"2"})
    (span,) = made(spans, exporter)
    assert span.name == "train" and span.attributes is not None
    assert {**span.attributes} == {
        "headrace.trajectory": "t.1.0", "headrace.update": 5, "headrace.policy_version": 6
    }  # fmt: skip


async def test_one_record_of_a_message_makes_its_slot_its_span_and_its_counts(tmp_path: Path) -> None:
    """The three views of a message agree, as they come from one record."""
    exporter, clock = InMemorySpanExporter(), ManualClock()
    with (
        closing(FlowRingWriter(tmp_path / "flow", WHO)) as ring,
        closing(FlowRingReader(ring.path)) as reader,
        closing(FlowRecorder(clock, ring, spans := spans_of(exporter))) as flow,
    ):
        inbox = Inbox("reward-0", clock, flow)
        kept, bad = CHUNK, ChunkId(FIRST, 1)
        for one in (kept, bad):
            inbox.took(one, "generator-0#1", size=4, span="reward", facts={"chunk": str(one)})
        await clock.advance(2.0)
        inbox.begun([kept, bad])
        await clock.advance(3.0)
        inbox.stored(kept)
        inbox.failed(bad, "ValueError")
        (link,) = inbox.reports([LinkStats("generator-0#1", 2)])
        slots = read(reader)
    found = {span.attributes["headrace.chunk"]: span for span in made(spans, exporter)}  # type: ignore[index]
    assert (link.received, link.done, link.stored, link.open) == (2, 2, 1, 0)
    for one, slot in zip((kept, bad), slots, strict=True):
        assert isinstance(slot, Ended) and (slot.key, slot.waited_s, slot.service_s) == (key_of(one), 2.0, 3.0)
        span = found[str(one)]
        assert (span.name, span.end_time - span.start_time) == ("reward", 5_000_000_000)  # type: ignore[operator]
        assert span.status.is_ok is (slot.outcome is MessageOutcome.STORED)


def test_a_share_of_the_trajectories_is_traced_and_every_worker_traces_the_same_ones() -> None:
    found: list[set[str]] = []
    for _ in range(2):
        exporter = InMemorySpanExporter()
        spans = spans_of(exporter, share=0.25)
        for group in range(400):
            spans.add(ended("sample", ChunkId(TrajectoryId("t", group, 0), 0)))
        found.append({str(span.attributes["headrace.trajectory"]) for span in made(spans, exporter)})  # type: ignore[index]
    assert found[0] == found[1] and 60 < len(found[0]) < 140
    assert root_ids("run", FIRST) != root_ids("other", FIRST)


class Collector(http.server.BaseHTTPRequestHandler):
    """Takes OTLP over HTTP, as a collector does."""

    received: ClassVar[list[ExportTraceServiceRequest]] = []
    paths: ClassVar[list[str]] = []

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.paths.append(self.path)
        self.received.append(ExportTraceServiceRequest.FromString(body))
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - its name
        pass


@pytest.fixture
def collector() -> Iterator[str]:
    Collector.received, Collector.paths = [], []
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join(5.0)


def test_a_collector_on_loopback_receives_spans_over_otlp(collector: str) -> None:
    spans = open_spans(TracingSection(otlp=collector), "run", WHO, LOG)
    assert spans is not None
    context = spans.add(ended("sample", num_tokens=4))
    spans.close(10.0)
    assert Collector.paths == ["/v1/traces"]
    (resource,) = Collector.received[0].resource_spans
    (span,) = resource.scope_spans[0].spans
    assert (span.name, f"00-{span.trace_id.hex()}-{span.span_id.hex()}-01") == ("sample", context)
    assert {one.key: one.value.int_value for one in span.attributes}["headrace.num_tokens"] == 4
    assert "headrace-generator" in str(resource.resource)


def test_a_collector_that_is_away_is_named_once_and_loses_spans_alone() -> None:
    class Away(InMemorySpanExporter):
        result = SpanExportResult.FAILURE

        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            return self.result

    away = Away()
    with capture_logs() as lines:
        exporter = tracing._told(away, "http://host:4318/v1/traces", LOG)
        for result in (SpanExportResult.FAILURE, SpanExportResult.FAILURE, SpanExportResult.SUCCESS):
            away.result = result
            exporter.export([])
    assert [line["event"] for line in lines] == ["spans_not_sent", "spans_sent_again"]
    assert lines[0]["url"] == "http://host:4318/v1/traces"


def test_a_worker_that_ends_waits_for_a_silent_collector_no_longer_than_its_limit() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        spans = open_spans(TracingSection(otlp=f"http://127.0.0.1:{silent.getsockname()[1]}"), "run", WHO, LOG)
        assert spans is not None
        spans.add(ended("sample"))
        began_s = time.monotonic()
        spans.close(0.2)
        assert time.monotonic() - began_s < tracing._EXPORT_S


def test_without_a_collector_there_are_no_spans_and_no_package_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "missing_package", lambda: "pip install 'headrace[otel]'")
    assert open_spans(TracingSection(), "run", WHO, LOG) is None


def test_a_missing_package_is_named_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "missing_package", lambda: "pip install 'headrace[otel]'")
    config = small_run(tmp_path).model_copy(update={"tracing": TracingSection(otlp="http://127.0.0.1:4318")})
    told = [finding.found for finding in diagnose(config) if finding.level == "error"]
    assert [words for words in told if "pip install 'headrace[otel]'" in words]


@pytest.mark.parametrize("url", ["127.0.0.1:4318", "http://user:secret@host:4318", "ftp://host", "http://host/?key=1"])
def test_a_url_that_is_no_collectors_is_refused_without_its_secret(url: str) -> None:
    with pytest.raises(ValueError, match="URL of a collector") as told:
        TracingSection(otlp=url)
    assert "OTEL_EXPORTER_OTLP_HEADERS" in str(told.value)
