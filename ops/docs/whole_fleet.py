"""A run that shows every existing metric with each of its labels, for the page about metrics."""

from __future__ import annotations

from typing import Final

from pipeline.fleet.repair.records import PARTS
from pipeline.fleet.state import Worker
from pipeline.ledger.types import DropReason, QueueStat, Totals
from pipeline.observability.effective_time import EffectiveTime
from pipeline.observability.metric_names import ENDPOINT_METRICS, REWARD_PART_COUNTER, WORKER_METRICS
from pipeline.observability.metrics import HeartbeatCollector
from pipeline.process.work import ServiceSums
from pipeline.runtime.clock import RealClock
from pipeline.runtime.registry.contract import LinkReport, WaitingFor
from pipeline.runtime.registry.entries import JUDGMENTS_ABSENT, Vitals
from protocol.ids import Incarnation, Role

_ROLES: Final = tuple(role for role in Role if role is not Role.SUPERVISOR)


def whole_collector() -> HeartbeatCollector:
    """Return a collector with every counter on every role, and every wait, queue and reason."""
    counters = dict.fromkeys(WORKER_METRICS, 1.0) | {f"judge:{name}": 1.0 for name in ENDPOINT_METRICS}
    counters[f"{REWARD_PART_COUNTER}correct"] = 1.0
    counters[f"{JUDGMENTS_ABSENT}outage"] = 1.0
    links = (
        LinkReport(
            name="generator-0>reward-0",
            **dict.fromkeys(("sent", "received", "done", "refused", "gaps", "produced", "stored", "open"), 1),
            oldest_age_s=0.5,
        ),
    )
    vitals = Vitals(
        num_fds=40,
        disk_free_bytes=1 << 30,
        disk_free_share=0.5,
        gpu_util=0.5,
        gpu_mem_bytes=1 << 30,
        gpu_power_w=300.0,
        service={"update": ServiceSums(1, 2.0, 3.0)},
        input_depth=1,
        output_depth=1,
    )
    beats = [
        Worker(
            who=Incarnation(role=role, worker=f"{role}-{number}", epoch=1),
            pid=1,
            host="host",
            at_s=1.0,
            started_s=0.0,
            progress=1,
            progress_at_s=1.0,
            waiting_for=waiting,
            counters=counters,
            links=links,
            vitals=vitals,
        )
        for role in _ROLES
        for number, waiting in enumerate(WaitingFor)
    ]
    queues = [QueueStat(name, 1, 10, 0.5, "learner") for name in ("ready", "bytes", *map(str, _ROLES))]
    dropped = dict.fromkeys(map(str, DropReason), 1)
    totals = Totals(1, 1, 1, 1, 1, 1, dropped, 1, 1, is_closed=False, is_exhausted=False)
    info = {"algorithm": "dapo", "engine": "local", "backend": "torch", "model": "tiny"}
    collector = HeartbeatCollector(RealClock(), "run", info)
    collector.update(beats, queues, totals, EffectiveTime(1.0, 1.0, 1.0, 10.0, 100.0, 0.5, dict.fromkeys(PARTS, 2.0)))
    return collector
