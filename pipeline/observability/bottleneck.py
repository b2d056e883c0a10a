"""The worker that everything waits for, in one sentence, for ``status``, ``top`` and the live view.

It reads the wait-for graph that ``why`` reads, from the learner on. ``why`` knows the ledger's view
besides, and names the unit, the trajectory and the next step."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.observability.status import Health, WorkerRow, doing
from pipeline.runtime.registry.contract import WaitingFor
from protocol.ids import Role

_LIKELY = (WaitingFor.COMPUTE, WaitingFor.ENDPOINT)
"""Ends of waits that limit a run, the likelier the later."""


def bottleneck(workers: Sequence[WorkerRow]) -> str:
    """Return where the waits end that begin at the first worker: the learner, if there is one.

    They end at workers that wait for no other. An outside service counts before a worker at work;
    of equals the one longest still. In a circle of waits every worker is such an end.
    ``workers``: in the order of ``worker_rows``."""
    unwell = [row for row in workers if row.health is not Health.LIVE and row.role is not Role.OBSERVER]
    if unwell:
        row = unwell[0]
        age = row.since_heartbeat_s if row.health is Health.SILENT else row.since_progress_s
        return f"{row.worker} is {row.health} for {age:.0f} s ({row.waiting_for})"
    if not workers:
        return "no worker has a heartbeat"
    path = _way_of_waits(workers)
    end = path[-1]
    what = doing(end)
    if end.waiting_for is WaitingFor.INPUT and not any(row.role is Role.GENERATOR for row in workers):
        what += "; no generator has a heartbeat"
    return f"{' waits for '.join(row.worker for row in path)}{', which' if len(path) > 1 else ''} is at {what}"


def _way_of_waits(workers: Sequence[WorkerRow]) -> list[WorkerRow]:
    """Return the workers from the first one to the end of its waits."""
    # Deferred: it imports numpy, and a view begins without.
    from pipeline.flow.graph import ways
    from pipeline.observability.wait_graph import graph_of

    graph = graph_of(workers)
    before = ways(graph, workers[0].worker)
    behind = [row for row in workers if row.worker in before]
    if not behind:
        return [workers[0]]
    ends = [row for row in behind if not graph.get(row.worker)] or behind
    end = max(ends, key=lambda row: (*(row.waiting_for is at for at in reversed(_LIKELY)), row.since_progress_s))
    way = [end.worker]
    while way[-1] in before:
        way.append(before[way[-1]])
    by_name = {row.worker: row for row in workers}
    return [by_name[name] for name in reversed(way) if name in by_name]
