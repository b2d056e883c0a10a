"""The wait-for graph of ``pipeline.flow`` at one moment, from the workers of a snapshot.

The observer looks at the same graph second by second. A moment has no counters of links: a link is
taken for full when the words of a wait name its receiver. An empty input waits for any worker of
the roles that feed it. ``why`` does not follow waits for input, since the ledger's view names the
work that is waited for. The sentence of ``status`` has no such view, and does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pipeline.flow.fleet import FleetTracks
from pipeline.flow.graph import Graph, wait_graph
from pipeline.flow.rows import LinkRow, StateRow
from pipeline.flow.wait_words import fleet_names, wait_word
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
