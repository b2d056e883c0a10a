"""A run as Prometheus metrics.

The supervisor passes in the heartbeats, queues and totals it reads anyway; one HTTP endpoint serves them
for the whole fleet, on 127.0.0.1 unless configured otherwise. A scrape reads the latest heartbeats and
waits for nothing.

Every metric but ``headrace_build_info`` has the label ``run``; those of a worker also have ``role`` and
``worker``. ``metric_names`` lists the counters in heartbeats.
    headrace_up, headrace_worker_*      a worker: heartbeat, progress, wait, version, vitals
    headrace_worker_service_*{kind}     finished work by its kind: pieces, time, tokens
    headrace_link_*{link}               messages between two workers, or to a role
    headrace_queue_*{queue}             a ledger's queue: entries, limit, age of the oldest
    headrace_ledger_*                   admitted, dropped by reason, credit, tokens
    headrace_learner_input_wait_ratio   share of recent time that the learner waits for units
    headrace_effective_time_ratio{by}   time that became updates: by steps, last_hour, device
    headrace_registry_unreadable_entries  entries that the supervisor cannot read and skips
    headrace_repair_seconds{part}       workers under repair: detect, localise, replace, reload, repeat
    headrace_run_info, headrace_build_info
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from typing import Final, Self

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pipeline.fleet.state import Worker
from pipeline.ledger.types import QueueStat, Totals
from pipeline.observability.effective_time import EffectiveTime
from pipeline.observability.metric_names import (
    ABSENT_JUDGMENTS,
    ENDPOINT_METRICS,
    GENERATOR_METRICS,
    PREFIX,
    REWARD_PART,
    REWARD_PART_COUNTER,
    WORKER_METRICS,
    MetricName,
)
from pipeline.runtime.clock import Clock
from pipeline.runtime.liveness import is_silent
from pipeline.runtime.registry.contract import WaitingFor
from pipeline.runtime.registry.entries import JUDGMENTS_ABSENT, Vitals
from protocol.errors import ConfigError
from protocol.ids import Role

_MEMORY_S = 60.0
_MAX_STEP_S = 10.0
"""Longer gaps between two readings count as this much, because what happened between is unknown."""


class LearnerWaits:
    """The share of time the learner waits for units, which drives the number of generators.

    An exponential average that halves in 42 s. Time is an argument."""

    def __init__(self) -> None:
        self.share = 0.0
        self._seen_s: float | None = None

    def skip(self) -> None:
        """Ignore the time until the next reading, because it says nothing about demand."""
        self._seen_s = None

    def observe(self, beats: Iterable[Worker], now_s: float) -> float:
        """Add a reading of heartbeats at ``now_s`` (monotonic); return the share."""
        learner = next((beat for beat in beats if beat.who.role is Role.LEARNER), None)
        if learner is None:
            self._seen_s = None
            return self.share
        if self._seen_s is not None:
            kept = math.exp(-min(now_s - self._seen_s, _MAX_STEP_S) / _MEMORY_S)
            self.share = kept * self.share + (1.0 - kept) * float(learner.waiting_for is WaitingFor.INPUT)
        self._seen_s = now_s
        return self.share


_LINK_METRICS: Final = {
    "sent": MetricName(f"{PREFIX}link_sent_messages_total", "Messages that a link's sender has sent."),
    "produced": MetricName(
        f"{PREFIX}link_produced_messages_total",
        "Messages produced for the workers of a role; the link ends at the role.",
    ),
    "received": MetricName(f"{PREFIX}link_received_messages_total", "Messages that a link's mailbox has received."),
    "done": MetricName(f"{PREFIX}link_done_messages_total", "Received messages that were handled completely."),
    "stored": MetricName(f"{PREFIX}link_stored_messages_total", "Received messages whose result is in the ledger."),
    "refused": MetricName(f"{PREFIX}link_refused_messages_total", "Messages that a link or mailbox refused."),
    "gaps": MetricName(f"{PREFIX}link_lost_messages_total", "Messages missing in a link's sequence."),
}
"""By field of a LinkReport that only grows."""
_LINK_OPEN: Final = MetricName(f"{PREFIX}link_open_messages", "Messages at either end of a link that are not done.")
_LINK_AGE: Final = MetricName(f"{PREFIX}link_oldest_message_age_seconds", "Age of the oldest open message of a link.")
_VITALS: Final = {
    "loop_lag_ms": (MetricName(f"{PREFIX}worker_loop_lag_seconds", "Longest delay of the main loop's timer."), 1e-3),
    "cpu": (
        MetricName(f"{PREFIX}worker_used_cores", "Average cores used by the process since its last heartbeat."),
        1.0,
    ),
    "num_fds": (MetricName(f"{PREFIX}worker_open_files", "Open file descriptors of the process."), 1.0),
    "disk_free_bytes": (MetricName(f"{PREFIX}worker_disk_free_bytes", "Room on the run folder's file system."), 1.0),
    "disk_free_share": (MetricName(f"{PREFIX}worker_disk_free_ratio", "Free share of that file system."), 1.0),
    "gpu_util": (
        MetricName(f"{PREFIX}worker_gpu_used_ratio", "Share of time that a kernel ran, over the visible GPUs."),
        1.0,
    ),
    "gpu_mem_bytes": (MetricName(f"{PREFIX}worker_gpu_memory_bytes", "Used memory of the visible GPUs."), 1.0),
    "gpu_power_w": (MetricName(f"{PREFIX}worker_gpu_power_watts", "Power draw of the visible GPUs."), 1.0),
    "errors": (MetricName(f"{PREFIX}worker_errors_total", "Pieces of work that failed."), 1.0),
    "retries": (MetricName(f"{PREFIX}worker_retries_total", "Ledger calls and requests that were repeated."), 1.0),
    "refused": (MetricName(f"{PREFIX}worker_refused_messages_total", "Messages that its mailboxes refused."), 1.0),
    "ledger_rtt_ms": (
        MetricName(f"{PREFIX}worker_ledger_answer_seconds", "Moving mean of a ledger call's time."),
        1e-3,
    ),
    "oldest_age_s": (
        MetricName(f"{PREFIX}worker_oldest_work_age_seconds", "Age of the oldest work held."),
        1.0,
    ),
    "input_depth": (
        MetricName(f"{PREFIX}worker_waiting_work", "Work waiting for the worker, as far as known."),
        1.0,
    ),
    "output_depth": (MetricName(f"{PREFIX}worker_finished_work", "Finished work not yet stored or sent."), 1.0),
}
"""By field of a worker's vitals, with the factor to the metric's unit."""
_SERVICE: Final = {
    "pieces": MetricName(f"{PREFIX}worker_service_pieces_total", "Finished pieces of a kind of work."),
    "seconds": MetricName(f"{PREFIX}worker_service_seconds_total", "Time of finished pieces of a kind of work."),
    "size": MetricName(f"{PREFIX}worker_service_tokens_total", "Size of finished pieces of a kind of work, in tokens."),
}
"""By field of ``ServiceSums``."""


class _Families:
    def __init__(self, run: str) -> None:
        self._run = run
        self._families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}

    def add(self, metric: MetricName, value: float, **labels: str) -> None:
        """Add a value. All calls for a metric must use the same labels."""
        given = {"run": self._run, **labels}
        family = self._families.get(metric.name)
        if family is None:
            kind = CounterMetricFamily if metric.only_grows else GaugeMetricFamily
            name = metric.name.removesuffix("_total") if metric.only_grows else metric.name
            family = self._families[metric.name] = kind(name, metric.help, labels=list(given))
        family.add_metric(list(given.values()), value)

    def gauge(self, name: str, text: str, value: float, **labels: str) -> None:
        self.add(MetricName(PREFIX + name, text), value, **labels)

    def counter(self, name: str, text: str, value: float, **labels: str) -> None:
        self.add(MetricName(f"{PREFIX}{name}_total", text), value, **labels)

    def all(self) -> list[Metric]:
        return list(self._families.values())


class HeartbeatCollector(Collector):
    """Turns the latest heartbeats into metrics, for each scrape."""

    def __init__(self, clock: Clock, run: str, info: Mapping[str, str] | None = None) -> None:
        """``info``: additional labels of ``headrace_run_info`` and their values."""
        self._clock, self._run, self._info = clock, run, dict(info or {})
        self._heartbeats: tuple[Worker, ...] = ()
        self._queues: tuple[QueueStat, ...] = ()
        self._totals: Totals | None = None
        self._effective: EffectiveTime | None = None
        self._num_unreadable = 0
        self._waits = LearnerWaits()
        self._read_s = clock.monotonic()

    def update(
        self,
        heartbeats: Iterable[Worker],
        queues: Iterable[QueueStat],
        totals: Totals | None = None,
        effective: EffectiveTime | None = None,
        num_unreadable: int = 0,
    ) -> None:
        """Set what the next scrape returns. ``num_unreadable``: registry entries that cannot be read. If
        totals or effective time are None, the previous ones are kept."""
        self._num_unreadable = num_unreadable
        self._heartbeats, self._read_s = tuple(heartbeats), self._clock.monotonic()
        self._queues = tuple(queues)
        self._totals = totals or self._totals
        self._effective = effective or self._effective
        if self._is_paused:
            self._waits.skip()
        else:
            self._waits.observe(self._heartbeats, self._read_s)

    @property
    def _is_paused(self) -> bool:
        return self._totals is not None and self._totals.paused is not None

    def collect(self) -> Iterable[Metric]:
        families = _Families(self._run)
        since_s = self._clock.monotonic() - self._read_s
        families.gauge("run_info", "The run; its value is always 1.", 1.0, **self._info)
        for beat in self._heartbeats:
            _add_worker(families, beat, since_s)
            _add_counters(families, beat)
        _add_links(families, self._heartbeats)
        for queue in self._queues:
            _add_queue(families, queue)
        if self._totals is not None:
            _add_totals(families, self._totals)
        waits = "Share of recent time that the learner waits for units, from 0 to 1; 0 while paused."
        families.gauge("learner_input_wait_ratio", waits, 0.0 if self._is_paused else self._waits.share)
        if self._effective is not None:
            _add_effective(families, self._effective)
        dropped = "Entries of the registry that the supervisor cannot read and skips."
        families.gauge("registry_unreadable_entries", dropped, self._num_unreadable)
        build = GaugeMetricFamily(f"{PREFIX}build_info", "The program; its value is always 1.", labels=["version"])
        build.add_metric([version("headrace")], 1.0)
        return [build, *families.all()]


class MetricsServer:
    """The HTTP endpoint. Use as a context manager, or ``close`` it."""

    def __init__(
        self, port: int, clock: Clock, *, host: str = "127.0.0.1", run: str = "", info: Mapping[str, str] | None = None
    ) -> None:
        """Listen on ``port``; 0 picks a free one. ``info``: labels of ``headrace_run_info``. Raises
        ConfigError if the port is in use."""
        registry = CollectorRegistry(auto_describe=False)
        self._collector = HeartbeatCollector(clock, run, info)
        registry.register(self._collector)
        try:
            self._server, self._thread = start_http_server(port, addr=host, registry=registry)
        except OSError as error:
            taken = f"supervisor.metrics_port is {port}: {error.strerror}"
            raise ConfigError(f"{taken}; choose a free port, or leave it out") from error

    @property
    def port(self) -> int:
        return int(self._server.server_port)

    def update(
        self,
        heartbeats: Iterable[Worker],
        queues: Iterable[QueueStat] = (),
        totals: Totals | None = None,
        effective: EffectiveTime | None = None,
        num_unreadable: int = 0,
    ) -> None:
        """Same as ``HeartbeatCollector.update``."""
        self._collector.update(heartbeats, queues, totals, effective, num_unreadable)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        thread: threading.Thread = self._thread
        thread.join(5.0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _add_effective(families: _Families, time: EffectiveTime) -> None:
    shares = {"steps": time.by_steps, "last_hour": time.last_hour, "device": time.by_device}
    for by, share in shares.items():
        if share is not None:
            families.gauge("effective_time_ratio", "Share of the time up that became updates.", share, by=by)
    for part, seconds in time.lost_s.items():
        families.gauge("repair_seconds", "Time of workers under repair.", seconds, part=part.removesuffix("_s"))


def _add_worker(families: _Families, beat: Worker, since_s: float) -> None:
    of = {"role": str(beat.who.role), "worker": beat.who.worker}
    families.gauge(
        "up", "1 while the worker's heartbeat is fresh.", float(not is_silent(beat.silent_s + since_s)), **of
    )
    families.gauge("worker_start_time_seconds", "Start of the process, in seconds since 1970.", beat.started_s, **of)
    families.counter("worker_progress", "Productive turns of the main loop.", beat.progress, **of)
    age_s = max(0.0, beat.at_s - beat.progress_at_s + beat.silent_s + since_s)
    families.gauge("worker_progress_age_seconds", "Time since the main loop last made progress.", age_s, **of)
    families.gauge("worker_policy_version", "Version served or published; -1 for none.", beat.policy_version, **of)
    families.gauge("worker_resident_memory_bytes", "Resident memory of the process.", beat.rss_bytes, **of)
    waits = "1 for the current kind of wait."
    families.gauge("worker_waiting", waits, 1.0, **of, **{"for": str(beat.waiting_for)})
    families.gauge("worker_held_work", "Work taken but not finished.", beat.held, **of)
    if beat.vitals is not None:
        _add_vitals(families, beat.vitals, of)


def _add_vitals(families: _Families, vitals: Vitals, of: Mapping[str, str]) -> None:
    for name, (metric, factor) in _VITALS.items():
        value: float | None = getattr(vitals, name)
        if value is not None:
            families.add(metric, factor * value, **of)
    for kind, sums in sorted(vitals.service.items()):
        for name, metric in _SERVICE.items():
            families.add(metric, getattr(sums, name), **of, kind=kind)


def _add_counters(families: _Families, beat: Worker) -> None:
    of = {"role": str(beat.who.role), "worker": beat.who.worker}
    for name, value in sorted(beat.counters.items()):
        endpoint, _, what = name.rpartition(":")
        if (metric := WORKER_METRICS.get(name)) is not None:
            families.add(metric, value, **of)
        elif endpoint and (metric := ENDPOINT_METRICS.get(what)) is not None:
            families.add(metric, value, **of, endpoint=endpoint)
        elif (begin := GENERATOR_METRICS.get(f"{endpoint}:")) is not None:
            families.add(begin, value, **of, generator=what)
        elif name.startswith(JUDGMENTS_ABSENT):
            families.add(ABSENT_JUDGMENTS, value, **of, reason=name.removeprefix(JUDGMENTS_ABSENT))
        elif name.startswith(REWARD_PART_COUNTER):
            families.add(REWARD_PART, value, **of, part=name.removeprefix(REWARD_PART_COUNTER))


def _add_links(families: _Families, heartbeats: Sequence[Worker]) -> None:
    sums: dict[tuple[str, str], int] = {}
    for link in (link for beat in heartbeats for link in beat.links):
        for counted in _LINK_METRICS:
            sums[counted, link.name] = sums.get((counted, link.name), 0) + getattr(link, counted)
    for (counted, name), value in sorted(sums.items()):
        families.add(_LINK_METRICS[counted], value, link=name)
    num_open: dict[str, int] = {}
    ages_s: dict[str, float] = {}
    for link in (link for beat in heartbeats for link in beat.links):
        num_open[link.name] = num_open.get(link.name, 0) + link.open
        ages_s[link.name] = max(ages_s.get(link.name, 0.0), link.oldest_age_s)
    for name, value in sorted(num_open.items()):
        families.add(_LINK_OPEN, value, link=name)
        families.add(_LINK_AGE, ages_s[name], link=name)


def _add_queue(families: _Families, queue: QueueStat) -> None:
    families.gauge("queue_depth", "Entries of a ledger's queue.", queue.depth, queue=queue.name)
    if queue.limit is not None:
        families.gauge("queue_limit", "Maximum entries of a ledger's queue.", queue.limit, queue=queue.name)
    if queue.oldest_age_s is not None:
        text = "Age of the oldest entry of a ledger's queue."
        families.gauge("queue_oldest_age_seconds", text, queue.oldest_age_s, queue=queue.name)


def _add_totals(families: _Families, totals: Totals) -> None:
    families.gauge("ledger_policy_version", "Version that the learner has published.", totals.policy_version)
    families.gauge(
        "ledger_credit_used", "Credit taken by trained, claimed, ready and running work.", totals.credit_used
    )
    families.gauge("ledger_credit_limit", "Credit at the learner's version.", totals.credit_limit)
    families.gauge("ledger_ready_units", "Units waiting for the learner.", totals.num_ready_units)
    families.gauge("ledger_running", "Credit taken by work that is not ready.", totals.num_running)
    families.gauge("ledger_is_closed", "1 once nothing more is admitted.", float(totals.is_closed))
    families.gauge("ledger_is_paused", "1 while an operator has paused admission.", float(totals.paused is not None))
    families.counter("ledger_admitted_groups", "Groups admitted.", totals.num_groups_admitted)
    families.counter("ledger_generated_tokens", "Response tokens stored for training.", totals.num_tokens_generated)
    trained = "Response tokens of trained units; falls when the learner resumes from an older checkpoint."
    families.gauge("ledger_trained_tokens", trained, totals.num_tokens_trained)
    for reason, number in sorted(totals.num_groups_dropped.items()):
        families.counter("ledger_dropped_groups", "Groups dropped untrained, by reason.", number, reason=reason)
