"""The suspicions of a moment: findings of the watch and of the flow, joined by component.

Failed and replaced workers, blocked loops and stalled computations, and faults that workers report
themselves are certain. The watch (``pipeline.fleet.peers``) finds odd workers. The flow
(``pipeline.fleet.flow``) finds where progress stops, and the causes. If both name the same component they
become one suspicion, with the causes from the flow. A worker that the watch finds hung, slow, odd
or stale, and that waits for a named cause, is evidence for that cause. While the ledger answers
slowly, slowness elsewhere and differing clocks are only evidence for that. Pure: times are
arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from pipeline.fleet.flow.heartbeats import RowMaker
from pipeline.fleet.flow.offline import recorded
from pipeline.fleet.flow.rows import FlowIncident, Symptom
from pipeline.fleet.flow.watcher import LEAST_SLOW_LIVE, FlowWatch
from pipeline.fleet.incidents.book import Suspicion
from pipeline.fleet.incidents.records import FoundCause
from pipeline.fleet.peers.frame import Finding, Frame
from pipeline.fleet.peers.heartbeats import FrameMaker
from pipeline.fleet.peers.thresholds import Thresholds
from pipeline.fleet.peers.watcher import Watch
from pipeline.fleet.signs import LEDGER, LedgerPace, Signs
from pipeline.fleet.state import Worker
from pipeline.runtime.liveness import is_recent
from pipeline.runtime.registry.contract import FailureReport

AWAY_S: Final = 3.0
"""A registry that does not answer for this long is an incident."""
HELD_S: Final = 60.0
"""A finding from comparison holds this long; then the watch may find it again."""
_EVERY_S: Final = 1.0
_BACK_S: Final = 10.0
"""After an outage of the registry, heartbeats have this long to come back."""
_RIVAL_S: Final = 2.0
_FOLLOWING: Final = frozenset({"hung", "slow", "odd", "stale"})
"""Kinds of the watch that a cause elsewhere may explain."""
_STOPPING: Final = frozenset({"silent", "hung", "stuck", "errors", "replaced", "failed", "endpoint"})
"""Kinds after which a worker's work goes to others of its role."""
_STILL_SLOW: Final = 1.2
"""A slow worker's last pieces must take at least this many times as long as usual."""
_SLOWED: Final = frozenset({"slow", "slow_link", "odd", "clock"})
"""Kinds that a slow ledger explains."""


class FleetSuspicions:
    def __init__(self, *, max_lag: int = 2, swaps_in_windows: bool = True) -> None:
        self._frames, self._watch = FrameMaker(), Watch()
        self._rows, self._flow = (
            RowMaker(max_lag=max_lag, swaps_in_windows=swaps_in_windows),
            FlowWatch(least_slow=LEAST_SLOW_LIVE),
        )
        self._signs, self._pace = Signs(), LedgerPace()
        self._held: dict[tuple[str, str], tuple[Finding, str, float]] = {}
        """By worker and kind: the newest finding, the link that is blamed instead of the worker or "", and until
        when it holds."""
        self._stalls: dict[str, Suspicion] = {}
        """By component: the causes that the flow has named and not dropped."""
        self._rivals: dict[str, tuple[float, Suspicion]] = {}
        """By component: when an incident named it as a lesser cause."""
        self.tables: dict[str, NDArray[np.void]] = {}
        """States and links of the last moment, in the form stored in the run folder."""
        self._away_since_s: float | None = None
        """When the registry was first asked in vain; None while it answers."""
        self._back_s: float | None = None

    def judge_by(self, thresholds: Thresholds) -> None:
        """Use other thresholds for the watch, which starts over."""
        self._watch = Watch(thresholds=thresholds)

    def observe(
        self,
        now_s: float,
        at_s: float,
        beats: Sequence[Worker],
        published: int,
        failures: Sequence[FailureReport] = (),
    ) -> tuple[Frame, list[Suspicion]]:
        """Return the frame of this moment, and what is suspected. ``now_s`` is monotonic, ``at_s``
        wall-clock time, ``published`` the newest policy version or -1."""
        self.tables = {}
        frame = self._frames.frame(now_s, beats, published)
        certain = self._signs.observe(now_s, at_s, beats, failures)
        slow_ledger = self._pace.observe(now_s, at_s, beats)
        if self._comes_back(now_s, beats):
            return frame, certain
        told = {(one.component, one.kind) for one in certain}
        odd = [one for one in self._odd(now_s, at_s, frame) if (one.component, one.kind) not in told]
        states, links = self._rows.rows(now_s, beats, published)
        self.tables = recorded(states, links, ahead_s=at_s - now_s, given_s=at_s)
        for incident in self._flow.tick(now_s, states, links):
            best, *others = incident.causes
            self._stalls[best.component] = _stall(incident, incident.causes, at_s - now_s)
            self._rivals |= {cause.component: (now_s, _stall(incident, (cause,), at_s - now_s)) for cause in others}
        self._look_at_rivals(now_s)
        self._stalls = {name: stall for name, stall in self._stalls.items() if self._flow.is_named(name)}
        # a cause that comes and goes is not named again
        present = {name: stall for name, stall in self._stalls.items() if self._flow.lasts(name)}
        # a certain fault is never the consequence of a cause elsewhere
        own = [one for one in certain if one.component in present]
        found = joined(present.values(), [*odd, *own], lambda name: self._flow.behind(name, present))
        found += [one for one in certain if one.component not in present]
        found = [one for one in found if not _has_more_work(one, found)]
        return frame, explained(found, slow_ledger) if self._pace.explain(now_s) else found

    def _look_at_rivals(self, now_s: float) -> None:
        """Promote an incident's lesser cause once it has lasted and waits for no other."""
        for name, (named_s, stall) in list(self._rivals.items()):
            is_own = (
                Symptom(stall.kind).gravity <= 1
                and self._flow.lasts(name)
                and not self._flow.behind(name, self._stalls)
            )
            if not is_own or name in self._stalls:
                del self._rivals[name]
            elif now_s - named_s >= _RIVAL_S:
                self._stalls[name] = stall

    def away(self, now_s: float, at_s: float, asked_s: float, reason: str) -> list[Suspicion]:
        """Return what is suspected while the registry, asked at monotonic ``asked_s``, does not
        answer."""
        if self._away_since_s is None:
            self._away_since_s = asked_s
        self._back_s = None
        self._pace.away(now_s)
        away_s = now_s - self._away_since_s
        if away_s < AWAY_S:
            return []
        sentence = f"the registry has not answered for {away_s:.0f} s; the limit is {AWAY_S:g} s"
        return [Suspicion(LEDGER, "silent", at_s - away_s, sentence, score=away_s / AWAY_S, evidence=(reason,))]

    def _odd(self, now_s: float, at_s: float, frame: Frame) -> list[Suspicion]:
        for finding in self._watch.tick(frame):
            link = self._signs.refused_link(finding.worker) if finding.kind == "refused" else ""
            self._held[finding.worker, finding.kind] = finding, link, now_s + HELD_S
        for key, (finding, link, until_s) in list(self._held.items()):
            if self._watch.lasts(finding):
                self._held[key] = finding, link, now_s + _EVERY_S
            elif now_s >= until_s:
                del self._held[key]
                self._watch.forget(finding.worker)
        return [
            Suspicion(
                component=link or finding.worker,
                kind=finding.kind,
                since_s=at_s - (now_s - finding.since_s),
                sentence=finding.sentence,
                role="" if link else finding.role,
                score=finding.score,
            )
            for finding, link, _ in self._held.values()
            if self._is_present(finding)
        ]

    def _is_present(self, finding: Finding) -> bool:
        """Return whether a finding of slowness still holds for the worker's last pieces."""
        if (finding.kind, finding.metric) != ("slow", "service_ratio"):
            return True
        times = self._flow.times_as_long(finding.worker)
        return times is None or times >= _STILL_SLOW

    def _comes_back(self, now_s: float, beats: Sequence[Worker]) -> bool:
        """Return whether heartbeats are still coming back after an outage; the flow waits for that."""
        if self._away_since_s is None:
            return False
        self._back_s = now_s if self._back_s is None else self._back_s
        are_fresh = all(is_recent(beat.silent_s) for beat in beats)
        if not are_fresh and now_s - self._back_s < _BACK_S:
            return True
        self._away_since_s = self._back_s = None
        return False


def joined(stalls: Iterable[Suspicion], odd: Iterable[Suspicion], behind: Callable[[str], str]) -> list[Suspicion]:
    """Join the flow's ``stalls``, one per component, with the ``odd`` findings of the watch.

    ``behind`` returns the cause among ``stalls`` that a component waits for, or ""."""
    found = {one.component: one for one in stalls}
    others = list[Suspicion]()
    for one in odd:
        cause = one.component if one.component in found else behind(one.component) if one.kind in _FOLLOWING else ""
        stall = found.get(cause)
        if stall is None:
            others.append(one)
            continue
        since_s = min(stall.since_s, one.since_s) if cause == one.component else stall.since_s
        said = one.sentence if cause == one.component else f"{one.component} is {one.kind}: {one.sentence}"
        found[cause] = replace(stall, since_s=since_s, role=stall.role or one.role, evidence=(*stall.evidence, said))
    return [*found.values(), *others]


def _has_more_work(one: Suspicion, found: Sequence[Suspicion]) -> bool:
    """Return whether a worker is slow or odd only because it has another worker's work."""
    return (
        one.kind in ("slow", "odd")
        and not one.causes
        and any(
            other.role == one.role and other.component != one.component and other.kind in _STOPPING for other in found
        )
    )


def explained(found: Sequence[Suspicion], slow_ledger: Sequence[Suspicion]) -> list[Suspicion]:
    """Return the suspicions while the ledger is slow: ``found`` slowness becomes evidence for the
    ledger's."""
    slowed = [one for one in found if one.kind in _SLOWED and one.component != LEDGER]
    said = tuple(f"{one.component} is {one.kind}: {one.sentence}" for one in slowed)
    ledger = [replace(one, evidence=(*one.evidence, *said)) for one in slow_ledger]
    return [*ledger, *(one for one in found if one not in slowed)]


def _stall(incident: FlowIncident, causes: tuple[FoundCause, ...], ahead_s: float) -> Suspicion:
    """``causes`` come best first; ``ahead_s`` is the wall clock minus the flow's clock."""
    best = causes[0]
    return Suspicion(
        component=best.component,
        kind=best.kind,
        since_s=incident.trigger_s + ahead_s,
        sentence=best.evidence[0],
        score=best.confidence,
        evidence=best.evidence[1:],
        causes=causes,
    )
