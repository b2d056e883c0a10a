"""The wait-for graph: worker -> link -> worker, from wait reasons and link counters.

A full outbox waits for downstream. An empty input waits for every live upstream: the senders of its
links or, when links are unknown, the workers of the roles that feed its role. A wait that names a
worker waits for that worker only. A computing worker waits for nobody, so chains of waits end there."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Mapping
from collections.abc import Set as AbstractSet

from pipeline.fleet.flow.fleet import FleetTracks
from pipeline.fleet.flow.format import Awaited
from pipeline.fleet.flow.workers import WorkerTrack

Graph = Mapping[str, AbstractSet[str]]
"""Node -> the nodes it waits for. A node is a worker, a link (``sender>receiver``), or any worker of
a role (``>role``)."""

_WAITS_WITH_WORK = frozenset({Awaited.ROOM, Awaited.LOCK, Awaited.WEIGHTS})
"""Waits of workers that hold work. An idle worker waiting for input is not part of a deadlock."""


def wait_graph(fleet: FleetTracks, ledger: str = "", feeds: Mapping[str, Collection[str]] | None = None) -> Graph:
    """Build the wait-for graph.

    Args:
        fleet: Tracks of all workers and links.
        ledger: Name of the ledger's node, if waits for it should be included.
        feeds: Role -> the roles that feed it, for use when links are unknown."""
    graph: dict[str, set[str]] = defaultdict(set)
    fed = set[str]()
    for track in fleet.live():
        if track.has_own_work:
            continue
        for node, target in _waits_for(fleet, track, ledger):
            graph[track.worker].add(node)
            if node != target:
                graph[node].add(target)
        if feeds and track.wait is Awaited.INPUT and not track.target:
            feeding = feeds.get(fleet.role_of(track.worker), ())
            graph[track.worker].update(f">{role}" for role in feeding)
            fed.update(feeding)
    for role in fed:
        graph[f">{role}"].update(track.worker for track in fleet.members(role))
    return graph


def _waits_for(fleet: FleetTracks, track: WorkerTrack, ledger: str) -> Iterable[tuple[str, str]]:
    """Yield the next node of each wait (a link if there is one) and the worker behind it."""
    name = track.worker
    if track.is_blocked and track.wait is not Awaited.ROOM:
        return [(f"{name}>{target}", target) for target in _full_receivers(fleet, name)]
    named = other_end(track.target, name)
    match track.wait:
        case Awaited.ROOM:
            targets = [named] if named else _full_receivers(fleet, name)
            return [(f"{name}>{target}", target) for target in targets]
        case Awaited.LEDGER:
            return [(f"{name}>{named or ledger}", named or ledger)] if named or ledger else []
        case Awaited.INPUT | Awaited.WEIGHTS:
            senders = [named] if named else [link.row.sender for link in fleet.incoming(name)]
            return [(f"{sender}>{name}", sender) for sender in senders]
        case Awaited.LOCK:
            return [(named, named)] if named else []
        case _:
            return []


def other_end(target: str, name: str) -> str:
    """Return the worker that ``target`` names; for a link, the end that is not ``name``."""
    if ">" not in target:
        return target
    sender, _, receiver = target.partition(">")
    return sender if receiver == name else receiver


def _full_receivers(fleet: FleetTracks, name: str) -> list[str]:
    outgoing = fleet.outgoing(name)
    full = [link.row.receiver for link in outgoing if link.row.produced > link.row.sent]
    return full or [link.row.receiver for link in outgoing if link.row.sent > link.row.done]


def reached(graph: Graph, start: str) -> set[str]:
    """Return all nodes that ``start`` waits for, directly or indirectly."""
    seen, todo = set[str](), list(graph.get(start, ()))
    while todo:
        node = todo.pop()
        if node not in seen:
            seen.add(node)
            todo.extend(graph.get(node, ()))
    return seen


def ways(graph: Graph, start: str) -> dict[str, str]:
    """Return every node that ``start`` waits for, nearest first, mapped to its predecessor on the
    shortest path."""
    before, todo = dict[str, str](), deque([start])
    while todo:
        node = todo.popleft()
        for following in sorted(graph.get(node, ())):
            if following not in before and following != start:
                before[following] = node
                todo.append(following)
    return before


def waiters(graph: Graph, node: str, workers: Iterable[str]) -> int:
    """Return how many workers wait for a node, directly or indirectly."""
    behind: dict[str, list[str]] = defaultdict(list)
    for waiter, targets in graph.items():
        for target in targets:
            behind[target].append(waiter)
    seen, todo = set[str](), [node]
    while todo:
        for waiter in behind[todo.pop()]:
            if waiter not in seen:
                seen.add(waiter)
                todo.append(waiter)
    return len(seen & set(workers) - {node})


def circle(fleet: FleetTracks, least_s: float) -> list[WorkerTrack]:
    """Return a deadlock: workers that hold work and have each waited for the next, around a circle,
    for more than ``least_s``. The longest wait comes first; empty if there is no deadlock."""
    hard: dict[str, str] = {}
    for track in fleet.live():
        row = track.row
        has_work = row.in_flight > 0 or row.output_depth > 0 or row.input_depth > 0
        waits_s = row.time_s - max(track.waits_since_s, track.progressed_s)
        is_hard = track.wait in _WAITS_WITH_WORK or (track.wait is Awaited.INPUT and bool(track.target))
        if is_hard and has_work and waits_s > least_s + 2 * track.interval_s:
            targets = {target for _, target in _waits_for(fleet, track, "")}
            if len(targets) == 1:
                hard[track.worker] = targets.pop()
    for start in hard:
        path = [start]
        while (following := hard.get(path[-1], "")) and following not in path:
            path.append(following)
        if following == start and len(path) > 1:
            tracks = [fleet.workers[name] for name in path]
            first = max(range(len(tracks)), key=lambda i: tracks[i].row.time_s - tracks[i].waits_since_s)
            return tracks[first:] + tracks[:first]
    return []
