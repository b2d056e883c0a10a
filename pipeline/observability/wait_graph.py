"""The wait-for graph of ``pipeline.flow`` at one moment, from the workers of a snapshot, and in one
sentence the worker that everything waits for.

The observer reads the same graph every second. One moment has no counters of links, so a link counts
as full when a wait names its receiver. An empty input waits for any worker of the roles that feed it.
``why`` does not follow waits for input, since the ledger's view names the unit and the trajectory that
are waited for. The sentence has no such view, and follows them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pipeline.flow.fleet import FleetTracks
from pipeline.flow.format import fleet_names, wait_word
from pipeline.flow.graph import Graph, wait_graph
from pipeline.flow.rows import LinkRow, StateRow
from pipeline.observability.status import Health, WorkerRow, doing
from pipeline.runtime.registry.contract import WaitingFor, unreached_workers
from protocol.ids import Role

if TYPE_CHECKING:
    from pipeline.observability.status import WorkerRow


_SCORERS = tuple(map(str, (Role.REWARD, Role.REFERENCE, Role.VALUE)))
_FEEDS = {str(Role.LEARNER): (str(Role.GENERATOR), *_SCORERS)} | dict.fromkeys(_SCORERS, (str(Role.GENERATOR),))
"""Role -> the roles whose work it waits for."""


def graph_of(workers: Sequence[WorkerRow]) -> Graph:
    """Return who waits for whom among these workers. A worker that does not reach a mailbox waits
    for the network, and for no worker."""
    names = fleet_names([(row.worker, row.role) for row in workers])
    states, links = list[StateRow](), list[LinkRow]()
    for row in workers:
        word = wait_word(row.role, row.waiting_for, row.detail, names, is_behind=False)
        if row.waiting_for is WaitingFor.ROOM and unreached_workers(row.unreached) - {Role.LEARNER}:
            word = "endpoint"
        states.append(StateRow(0.0, row.worker, str(row.role), word))
        if word == "room":
            full = names.named_in(row.detail)
            links += [LinkRow(0.0, row.worker, receiver, sent=1, received=1, done=0) for receiver in full]
    fleet = FleetTracks()
    fleet.read(0.0, states, links)
    return wait_graph(fleet, feeds=_FEEDS)


def waited_for(graph: Graph, worker: str) -> list[str]:
    """Return the workers that a worker waits for, by name; a link leads to the worker at its other
    end."""
    nodes = graph.get(worker, ())
    ends = {end for node in nodes if ">" in node for end in graph.get(node, ())}
    return sorted((ends | {node for node in nodes if ">" not in node}) - {worker})


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
