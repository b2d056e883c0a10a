"""The wait-for graph of ``pipeline.fleet.flow`` at one moment, and in one sentence the worker that everything
waits for.

The observer builds the same graph every second from link counters. A single moment has none, so a link
counts as full if a wait names its receiver, and an empty input waits for all workers of the roles that
feed it. ``why`` does not follow waits for input, because the ledger tells it which unit and trajectory
is awaited; the sentence has no such information and follows them."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.fleet.flow.fleet import FleetTracks
from pipeline.fleet.flow.format import fleet_names, wait_word
from pipeline.fleet.flow.graph import Graph, wait_graph
from pipeline.fleet.flow.rows import LinkRow, StateRow
from pipeline.fleet.health import HealthKind
from pipeline.fleet.status import WorkerRow, doing
from pipeline.runtime.registry.contract import WaitingFor, unreached_workers
from protocol.ids import Role

_SCORERS = tuple(map(str, (Role.REWARD, Role.REFERENCE, Role.VALUE, Role.ENVIRONMENT)))
_FEEDS = {str(Role.LEARNER): (str(Role.GENERATOR), *_SCORERS)} | dict.fromkeys(_SCORERS, (str(Role.GENERATOR),))
"""Role -> the roles whose work it waits for."""


def graph_of(workers: Sequence[WorkerRow]) -> Graph:
    """Return who waits for whom. A worker that cannot reach a mailbox waits for the network and for no
    worker."""
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
    """Return the workers that a worker waits for, by name; a link stands for the worker at its other end."""
    nodes = graph.get(worker, ())
    ends = {end for node in nodes if ">" in node for end in graph.get(node, ())}
    return sorted((ends | {node for node in nodes if ">" not in node}) - {worker})


_LIKELY = (WaitingFor.COMPUTE, WaitingFor.ENDPOINT)
"""Kinds of wait at the end of a chain that limit a run, likelier ones last."""


def bottleneck(workers: Sequence[WorkerRow]) -> str:
    """Describe the chain of waits from the first worker, the learner if there is one, to its end.

    It ends at a worker that waits for no other. Among several, an outside service comes before a worker
    that computes, and then the one without progress for longest; in a circle, every worker is an end.
    ``workers``: in the order of ``worker_rows``."""
    unwell = [row for row in workers if row.health is not HealthKind.LIVE and row.role is not Role.OBSERVER]
    if unwell:
        row = unwell[0]
        return f"{row.worker} is {row.health} for {row.unwell_s:.0f} s ({row.waiting_for})"
    if not workers:
        return "no worker has a heartbeat"
    path = _path_of_waits(workers)
    end = path[-1]
    what = doing(end)
    if end.waiting_for is WaitingFor.INPUT and not any(row.role is Role.GENERATOR for row in workers):
        what += "; no generator has a heartbeat"
    return f"{' waits for '.join(row.worker for row in path)}{', which' if len(path) > 1 else ''} is at {what}"


def _path_of_waits(workers: Sequence[WorkerRow]) -> list[WorkerRow]:
    """Return the workers from the first one to the end of its waits."""
    # Deferred: it imports numpy, which a view does not need at first.
    from pipeline.fleet.flow.graph import ways

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
