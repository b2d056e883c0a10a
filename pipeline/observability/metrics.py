"""Heartbeats and queues as Prometheus metrics.

*Consumes* the fleet's heartbeats and the ledger's queues, which the supervisor reads. *Produces* an
HTTP endpoint for the whole fleet, on 127.0.0.1 unless set otherwise. *Waits for* no request: a
scrape reads the latest heartbeats.

    headrace_up{role,worker}                      1 while its heartbeat is fresh
    headrace_progress_total{role,worker}          turns of the main loop
    headrace_seconds_since_progress{role,worker}
    headrace_policy_version{role,worker}
    headrace_resident_bytes{role,worker}
    headrace_waiting{role,worker,for}             1 for what it waits for now
    headrace_link_messages_total{link,event}      event = sent | received | refused | gaps
    headrace_counter{role,worker,name}            the role's own counters
    headrace_queue_depth{run,queue}               entries of a ledger's queue
    headrace_learner_waits{run}                   share of recent time that the learner waits for units;
                                                  0 in a pause, which needs no generators
    headrace_paused{run}                          1 while an operator has paused admission"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import Self

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pipeline.ledger.types import QueueStat
from pipeline.observability.demand import LearnerWaits
from pipeline.runtime.clock import Clock
from pipeline.runtime.liveness import is_silent
from pipeline.runtime.registry.contract import Heartbeat
from protocol.errors import ConfigError

_WORKER = ["role", "worker"]


class HeartbeatCollector(Collector):
    """Turns the latest heartbeats into metrics for each scrape."""

    def __init__(self, clock: Clock, run: str) -> None:
        self._clock, self._run = clock, run
        self._heartbeats: tuple[Heartbeat, ...] = ()
        self._queues: tuple[QueueStat, ...] = ()
        self._waits = LearnerWaits()
        self._is_paused = False
        self._read_s = clock.monotonic()

    def update(self, heartbeats: Iterable[Heartbeat], queues: Iterable[QueueStat], *, is_paused: bool = False) -> None:
        """Set the latest heartbeats and queues. ``is_paused``: an operator has paused admission."""
        self._is_paused = is_paused
        self._heartbeats, self._read_s = tuple(heartbeats), self._clock.monotonic()
        self._queues = tuple(queues)
        if is_paused:
            self._waits.skip()
        else:
            self._waits.see(self._heartbeats, self._read_s)

    def collect(self) -> Iterable[Metric]:
        """Return every metric."""
        since_s = self._clock.monotonic() - self._read_s
        up = GaugeMetricFamily("headrace_up", "1 while the heartbeat is fresh", labels=_WORKER)
        progress = CounterMetricFamily("headrace_progress", "Turns of the main loop", labels=_WORKER)
        still = GaugeMetricFamily("headrace_seconds_since_progress", "Since the loop last moved", labels=_WORKER)
        version = GaugeMetricFamily("headrace_policy_version", "Served or published", labels=_WORKER)
        resident = GaugeMetricFamily("headrace_resident_bytes", "Resident memory", labels=_WORKER)
        waiting = GaugeMetricFamily("headrace_waiting", "1 for what it waits for", labels=[*_WORKER, "for"])
        counters = GaugeMetricFamily("headrace_counter", "The role's own counters", labels=[*_WORKER, "name"])
        for beat in self._heartbeats:
            labels = [str(beat.who.role), beat.who.worker]
            up.add_metric(labels, float(not is_silent(beat.silent_s + since_s)))
            progress.add_metric(labels, beat.progress)
            still.add_metric(labels, max(0.0, beat.at_s - beat.progress_at_s + beat.silent_s + since_s))
            version.add_metric(labels, beat.policy_version)
            resident.add_metric(labels, beat.rss_bytes)
            waiting.add_metric([*labels, str(beat.waiting_for)], 1.0)
            for name, value in sorted(beat.counters.items()):
                counters.add_metric([*labels, name], value)
        depth = GaugeMetricFamily("headrace_queue_depth", "Entries of a queue", labels=["run", "queue"])
        for queue in self._queues:
            depth.add_metric([self._run, queue.name], queue.depth)
        waits = GaugeMetricFamily("headrace_learner_waits", "Share of recent time at input", labels=["run"])
        waits.add_metric([self._run], 0.0 if self._is_paused else self._waits.share)
        paused = GaugeMetricFamily("headrace_paused", "1 while an operator has paused admission", labels=["run"])
        paused.add_metric([self._run], float(self._is_paused))
        links = _links(self._heartbeats)
        return [up, progress, still, version, resident, waiting, counters, depth, waits, paused, links]


class MetricsServer:
    """The endpoint. Use as a context manager, or ``close`` it."""

    def __init__(self, port: int, clock: Clock, *, host: str = "127.0.0.1", run: str = "") -> None:
        """Listen on ``port`` of an address; 0 takes a free one. Raises ConfigError for one in
        use."""
        registry = CollectorRegistry(auto_describe=False)
        self._collector = HeartbeatCollector(clock, run)
        registry.register(self._collector)
        try:
            self._server, self._thread = start_http_server(port, addr=host, registry=registry)
        except OSError as error:
            taken = f"supervisor.metrics_port is {port}: {error.strerror}"
            raise ConfigError(f"{taken}; choose a free port, or leave it out") from error

    @property
    def port(self) -> int:
        """The port of the endpoint."""
        return int(self._server.server_port)

    def update(
        self, heartbeats: Iterable[Heartbeat], queues: Iterable[QueueStat] = (), *, is_paused: bool = False
    ) -> None:
        """Set the latest heartbeats and queues. ``is_paused``: an operator has paused admission."""
        self._collector.update(heartbeats, queues, is_paused=is_paused)

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        thread: threading.Thread = self._thread
        thread.join(5.0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _links(heartbeats: Sequence[Heartbeat]) -> Metric:
    family = CounterMetricFamily("headrace_link_messages", "Messages of a link", labels=["link", "event"])
    sums: dict[tuple[str, str], int] = {}
    for beat in heartbeats:
        for link in beat.links:
            counted = {"sent": link.sent, "received": link.received, "refused": link.refused, "gaps": link.gaps}
            for event, value in counted.items():
                sums[link.name, event] = sums.get((link.name, event), 0) + value
    for (name, event), value in sorted(sums.items()):
        family.add_metric([name, event], value)
    return family
