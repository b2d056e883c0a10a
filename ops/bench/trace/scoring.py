"""Scores incidents against the truth: whether and how soon the cause was named, and wrong blame.

A run with a fault counts once. Its first incident within ``WITHIN_S`` after the onset is the answer; none
counts as a wrong answer. An incident before the onset makes the run wrong too. A healthy run is wrong with any
incident."""

from __future__ import annotations

import time
from dataclasses import dataclass
from math import ceil

from ops.bench.trace.faults import Truth
from ops.bench.trace.sampling import Tables
from pipeline.fleet.flow.rows import FlowIncident, LinkRow, StateRow
from pipeline.fleet.flow.watcher import FlowWatch

WITHIN_S = 60.0


@dataclass(frozen=True, slots=True)
class Answer:
    """The score of one run."""

    kind: str
    size: int
    seed: int
    is_fault: bool
    is_top1: bool
    is_top3: bool
    has_false: bool
    """An incident before the onset, or in a healthy run."""
    trigger_s: float | None
    """From onset to trigger."""
    named_s: float | None
    """From trigger to the name."""
    named: str
    truth: str
    analysis_ms: float
    """Time of the slowest tick."""
    mean_ms: float


def ticks(tables: Tables) -> list[tuple[float, list[StateRow], list[LinkRow]]]:
    """Return the rows by tick of one second, as an observer receives them."""
    step = max(1.0, tables.interval_s)
    number = ceil(tables.duration_s / step)
    found = [((i + 1) * step, list[StateRow](), list[LinkRow]()) for i in range(number + 1)]
    for row in tables.states:
        found[int(row.time_s / step)][1].append(row)
    for link in tables.links:
        found[int(link.time_s / step)][2].append(link)
    return found


def answer(tables: Tables, truth: Truth, size: int, seed: int) -> Answer:
    """Run the analysis on the tables, and compare it with the truth."""
    watch = FlowWatch()
    incidents, slowest_s, total_s = list[FlowIncident](), 0.0, 0.0
    every = ticks(tables)
    for now_s, states, links in every:
        began = time.perf_counter()
        incidents += watch.tick(now_s, states, links)
        took_s = time.perf_counter() - began
        slowest_s, total_s = max(slowest_s, took_s), total_s + took_s
    is_fault = bool(truth.components)
    early = [one for one in incidents if one.named_s < truth.onset_s or not is_fault]
    timely = [one for one in incidents if truth.onset_s <= one.named_s <= truth.onset_s + WITHIN_S and is_fault]
    first = timely[0] if timely else None
    names = [cause.component for cause in first.causes] if first else []
    blamed = [f"{one.named_s:.0f}s {one.causes[0].component} {one.causes[0].kind}" for one in (early or timely)[:2]]
    return Answer(
        truth.kind,
        size,
        seed,
        is_fault,
        bool(names) and names[0] in truth.components and not early,
        bool(truth.components & set(names)) and not early,
        bool(early),
        None if first is None else max(0.0, first.trigger_s - truth.onset_s),
        None if first is None else first.named_s - first.trigger_s,
        "; ".join(blamed),
        " ".join(sorted(truth.components)[:3]),
        slowest_s * 1e3,
        total_s / len(every) * 1e3,
    )
