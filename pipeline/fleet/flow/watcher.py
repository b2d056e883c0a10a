"""``FlowWatch``: rows in, incidents out, tick by tick.

Each tick reads the rows, collects suspects and ranks them on the wait-for graph. A cause is named when
it leads in two consecutive ticks. It is not named again while it lasts, and neither is anything that
may follow from it.

An analysis begins with the first sign of a stall, before any cause is known:

* *Open operation*: a worker's spell, or a message on a link, is longer than max(3 s, twice the 99th
  percentile).
* *Rule*: there is a suspect of any class."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import exp

from pipeline.fleet.flow.fleet import FleetTracks
from pipeline.fleet.flow.graph import Graph, reached, wait_graph, waiters
from pipeline.fleet.flow.rows import FlowIncident, LinkRow, StateRow, Symptom
from pipeline.fleet.flow.suspects import FlowSuspect, suspects
from pipeline.fleet.incidents.records import FoundCause

_SIGN_S = 30.0
"""A sign that began longer ago is not the first of a stall now."""
_GONE_S = 3.0
MAX_CAUSES = 3
LEAST_SLOW_LIVE = 2.5
"""In live runs a worker is slow from this ratio to the expected service time on. Smaller slowdowns are
left to the watch, which takes more time to judge them."""
_BASE_CONFIDENCE = (0.95, 0.9, 0.85, 0.75)
"""Confidence by class, given strong evidence and no rival."""
_RIVAL_FACTOR = 0.6
_OTHER_END_CONFIDENCE = 0.1
_LASTS_S = 30.0
"""A cause not seen for this long may be named again."""
_FOLLOWS_S = 10.0
"""How long after a cause was last seen slowness, errors and old weights may still follow from it."""


class FlowWatch:
    """The engine for live runs and for tables. Memory is bounded by the fleet."""

    def __init__(self, *, least_slow: float = 0.0) -> None:
        """``least_slow``: minimum ratio to the expected service time at which a worker is slow. There is
        no floor for foreign tables; in a live fleet, the watch finds small slowdowns."""
        self.fleet = FleetTracks()
        self._least_slow = least_slow
        self._signs: dict[str, tuple[float, float]] = {}
        """Current signs of a stall -> when each began, and when it was last seen."""
        self._leading = ""
        self._named: dict[str, float] = {}
        """Components that were named as causes -> when they were last suspected."""
        self._now_s = 0.0
        self._graph: Graph = {}

    def is_named(self, component: str) -> bool:
        """Return whether this cause was named recently enough not to be named again."""
        return component in self._named

    def lasts(self, component: str) -> bool:
        """Return whether a named cause was still suspected at the last tick."""
        return self._named.get(component) == self._now_s

    def behind(self, component: str, causes: Iterable[str]) -> str:
        """Return one of these causes for which the component waited at the last tick, or "". A link
        and its ends count as waiting for each other."""
        waited = reached(self._graph, component)
        others = (name for name in causes if name != component)
        return next((name for name in others if name in waited or _is_link_and_end(component, name)), "")

    def times_as_long(self, worker: str) -> float | None:
        """Return how many times longer than usual most of a worker's last pieces took, at least; None
        if unknown."""
        track = self.fleet.workers.get(worker)
        return None if track is None else track.service.at_least

    def tick(self, now_s: float, states: Sequence[StateRow], links: Sequence[LinkRow]) -> list[FlowIncident]:
        """Process new rows; return the incident that is named now, if any.

        ``now_s`` is the reader's clock. If a worker's old row is repeated, the worker has not left the
        fleet, so its silence counts. Merely missing rows prove nothing."""
        self.fleet.read(now_s, states, links)
        found = suspects(self.fleet, now_s, least_slow=self._least_slow)
        self._note_signs(now_s, found)
        ranked, graph = rank(self.fleet, found)
        self._now_s, self._graph = now_s, graph
        fresh = self._fresh(now_s, ranked, graph)
        leading = fresh[0].component if fresh else ""
        is_confirmed, self._leading = bool(leading) and leading == self._leading, leading
        if not is_confirmed:
            return []
        causes = self._causes(fresh, graph)
        self._named |= {suspect.component: now_s for suspect in fresh[:MAX_CAUSES]}
        first_s = min((began for began, _ in self._signs.values() if now_s - began <= _SIGN_S), default=now_s)
        return [FlowIncident(first_s, now_s, causes)]

    def _note_signs(self, now_s: float, found: Iterable[FlowSuspect]) -> None:
        signs = {f"{suspect.component} {suspect.symptom}" for suspect in found}
        signs |= {f"open {track.worker}" for track in self.fleet.live() if track.work_s() > track.limit_s()}
        self._signs |= {sign: (self._signs.get(sign, (now_s, now_s))[0], now_s) for sign in signs}
        self._signs = {sign: times for sign, times in self._signs.items() if now_s - times[1] <= _GONE_S}

    def _fresh(self, now_s: float, ranked: list[FlowSuspect], graph: Graph) -> list[FlowSuspect]:
        """Return the suspects that were not named, and that no named cause explains."""
        self._named |= {suspect.component: now_s for suspect in ranked if suspect.component in self._named}
        self._named = {name: seen_s for name, seen_s in self._named.items() if now_s - seen_s <= _LASTS_S}
        if not self._named:
            return ranked
        follows = any(now_s - seen_s <= _FOLLOWS_S for seen_s in self._named.values())
        return [
            suspect
            for suspect in ranked
            if suspect.component not in self._named
            and (suspect.gravity <= 1 or not follows)
            and not reached(graph, suspect.component) & self._named.keys()
            and not any(_is_link_and_end(suspect.component, name) for name in self._named)
        ]

    def _causes(self, fresh: list[FlowSuspect], graph: Graph) -> tuple[FoundCause, ...]:
        causes = list[FoundCause]()
        for place, suspect in enumerate(fresh[:MAX_CAUSES]):
            rivals = sum(other.gravity == suspect.gravity for other in fresh) - 1
            confidence = (
                _BASE_CONFIDENCE[suspect.gravity]
                * (1 - exp(-1.5 * suspect.strength))
                * _RIVAL_FACTOR**place
                / (1 + 0.15 * rivals)
            )
            number = waiters(graph, suspect.component, self.fleet.workers)
            behind = (f"{number} {'worker waits' if number == 1 else 'workers wait'} for it",) if number else ()
            causes.append(_cause(suspect.component, suspect.symptom, round(confidence, 3), suspect.evidence, *behind))
        best = fresh[0]
        if ">" in best.component and best.symptom is not Symptom.DEADLOCK:
            sender, _, receiver = best.component.partition(">")
            there = {cause.component for cause in causes}
            for name in (receiver, sender):
                if name not in there and len(causes) < MAX_CAUSES:
                    words = f"one end of {best.component}: a fault of a link and one of its end look alike"
                    causes.append(_cause(name, best.symptom, _OTHER_END_CONFIDENCE, words))
        return tuple(causes)


def _cause(component: str, symptom: Symptom, confidence: float, *evidence: str) -> FoundCause:
    return FoundCause(component=component, kind=str(symptom), confidence=confidence, evidence=evidence)


def rank(fleet: FleetTracks, found: Sequence[FlowSuspect]) -> tuple[list[FlowSuspect], Graph]:
    """Return the suspects with the likeliest cause first, and the wait-for graph.

    Suspects that wait for no other suspect come first. Among them the lowest class leads, then the
    earliest last progress, then the number of waiting workers it explains."""
    if not found:
        return [], {}
    ledger = next((suspect.component for suspect in found if suspect.symptom is Symptom.LEDGER), "")
    graph = wait_graph(fleet, ledger)
    components = {suspect.component for suspect in found}

    def place(suspect: FlowSuspect) -> tuple[bool, int, float, int, float, str]:
        waits = bool(reached(graph, suspect.component) & (components - {suspect.component}))
        behind = waiters(graph, suspect.component, fleet.workers)
        return (waits, suspect.gravity, -round(suspect.stalled_s), -behind, -suspect.strength, suspect.component)

    return sorted(found, key=place), graph


def _is_link_and_end(component: str, other: str) -> bool:
    """Return whether one of the two is a link and the other one of its ends."""
    return component in other.split(">") or other in component.split(">")
