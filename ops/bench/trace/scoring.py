"""From incidents and the truth to figures: whether and how soon the cause was named, wrong blame.

A run with a fault counts once. Its first incident after the onset, within ``WITHIN_S``, is the
answer; none is a miss, which counts as a wrong answer. An incident before the onset is a false one
and makes the run wrong too. A healthy run is wrong with any incident."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from math import ceil
from typing import Any

from ops.bench.trace.faults import Truth
from ops.bench.trace.sampling import Tables
from pipeline.flow.rows import FlowIncident, LinkRow, StateRow
from pipeline.flow.watcher import FlowWatch

WITHIN_S = 60.0

Ticker = Callable[[float, Sequence[StateRow], Sequence[LinkRow]], list[FlowIncident]]


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
    """Of the slowest tick."""
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


def answer(ticker: Ticker, tables: Tables, truth: Truth, size: int, seed: int) -> Answer:
    """Run the analysis on the tables, and compare with the truth."""
    incidents, slowest_s, total_s = list[FlowIncident](), 0.0, 0.0
    every = ticks(tables)
    for now_s, states, links in every:
        began = time.perf_counter()
        incidents += ticker(now_s, states, links)
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


def flow_watch() -> Ticker:
    """Return a fresh engine's tick."""
    return FlowWatch().tick


def written(conditions: Mapping[str, Any], answers: Sequence[Answer]) -> str:
    """Return conditions and raw answers as JSON, a line an answer."""
    columns = [field.name for field in fields(Answer)]
    rows = [json.dumps([_rounded(cell) for cell in astuple(one)]) for one in answers]
    head = json.dumps({**conditions, "columns": columns}, indent=1)[:-2]
    return head + ',\n "answers": [\n  ' + ",\n  ".join(rows) + "\n ]\n}\n"


def read_answers(text: str) -> list[Answer]:
    """Return the answers that ``written`` made."""
    found = json.loads(text)
    return [Answer(**dict(zip(found["columns"], row, strict=True))) for row in found["answers"]]


def _rounded(cell: Any) -> Any:
    return round(cell, 3) if isinstance(cell, float) else cell
