"""Turns current suspicions into incidents. Does no I/O; times are arguments.

    nothing ──suspected──> open ──another kind or cause──> open (grew)
                            │ ▲   not suspected for 2 s: quiet; then suspected: again
             calm for 30 s  │ │  suspected again within 2 min: the same number
                            ▼ │
                           ended ──later──> (forgotten; the next one has a new number)

Findings about one component form one incident, so a worker that is slow and then silent has one
incident with two kinds. At most ``MAX_OPEN`` are open; findings beyond that are only counted."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from pipeline.fleet.incidents.records import (
    MAX_CAUSES,
    MAX_EVIDENCE,
    MAX_WORDS_CHARS,
    FoundCause,
    Incident,
    IncidentRecord,
    IncidentStep,
    fold,
)

QUIET_S: Final = 2.0
"""An incident is quiet once its component has not been suspected for this long. While a fault lasts,
suspicion recurs every second, so a quiet incident calls for no repair."""
CALM_S: Final = 30.0
"""An incident ends once its component has not been suspected for this long."""
SAME_S: Final = 120.0
"""A component suspected again within this time of the end gets the same incident."""
MAX_OPEN: Final = 64
MAX_GROWN: Final = 100
"""How many growth records an incident may have, so that alternating causes cannot fill the disk. It may
also go quiet this often; after that it stays open."""


@dataclass(frozen=True, slots=True)
class Suspicion:
    """A finding about one component at this moment. Times are wall-clock seconds."""

    component: str
    kind: str
    since_s: float
    sentence: str
    role: str = ""
    score: float = 0.0
    evidence: tuple[str, ...] = ()
    causes: tuple[FoundCause, ...] = ()


@dataclass(slots=True)
class _Followed:
    incident: Incident
    seen_s: float
    num_grown: int = 0
    num_quiet: int = 0


class IncidentBook:
    """The open incidents, and those that ended recently."""

    def __init__(self, known: Iterable[Incident] = (), now_s: float = 0.0) -> None:
        """``known``: incidents of this run's earlier writers; their open ones continue."""
        self._followed: dict[str, _Followed] = {}
        self._next = 1
        self.num_unlisted = 0
        """Findings about further components while ``MAX_OPEN`` incidents were open."""
        for incident in known:
            self._next = max(self._next, incident.number + 1)
            seen_s = now_s if incident.ended_s is None else incident.ended_s
            self._followed[incident.component] = _Followed(incident, seen_s)
        self._forget(now_s)

    @property
    def open(self) -> tuple[Incident, ...]:
        """The open incidents, by number."""
        return tuple(entry.incident for entry in self._followed.values() if entry.incident.is_open)

    def update(self, now_s: float, suspicions: Iterable[Suspicion]) -> list[IncidentRecord]:
        """Return the new records. Several suspicions of one component may each add their kind."""
        records: list[IncidentRecord] = []
        for one in suspicions:
            record = self._record_suspicion(one, now_s)
            if record is not None:
                records.append(record)
        unseen = [one for one in self._followed.values() if one.incident.is_open and now_s - one.seen_s >= QUIET_S]
        for entry in unseen:
            if now_s - entry.seen_s >= CALM_S:
                records.append(self._append(entry, _bare_record(entry, IncidentStep.ENDED)))
            elif not entry.incident.is_quiet and entry.num_quiet < MAX_GROWN:
                entry.num_quiet += 1
                records.append(self._append(entry, _bare_record(entry, IncidentStep.QUIET)))
        self._forget(now_s)
        return records

    def add_stacks(self, component: str, lines: tuple[str, ...]) -> list[IncidentRecord]:
        """Return the record that adds stacks to an open incident; empty once it has ended. Its time is
        that of the last finding, so that an end is never earlier."""
        entry = self._followed.get(component)
        if entry is None or not entry.incident.is_open:
            return []
        score = entry.incident.records[-1].score
        return [self._append(entry, _bare_record(entry, IncidentStep.STOOD, score, _bounded(lines)))]

    def close(self) -> list[IncidentRecord]:
        """Return the records that end all open incidents when the writer leaves. The next writer
        reopens those that persist."""
        still_open = [one for one in self._followed.values() if one.incident.is_open]
        return [self._append(one, _bare_record(one, IncidentStep.ENDED)) for one in still_open]

    def _record_suspicion(self, one: Suspicion, now_s: float) -> IncidentRecord | None:
        entry = self._followed.get(one.component)
        if entry is None:
            if sum(entry.incident.is_open for entry in self._followed.values()) >= MAX_OPEN:
                self.num_unlisted += 1
                return None
            record = _record(self._next, IncidentStep.OPENED, one, now_s)
            self._next += 1
            self._followed[one.component] = _Followed(fold(None, record), now_s)
            return record
        entry.seen_s = now_s
        if not entry.incident.is_open:
            return self._append(entry, _record(entry.incident.number, IncidentStep.OPENED, one, now_s))
        is_news = one.kind not in entry.incident.kinds or _first(one.causes) not in (
            None,
            _first(entry.incident.causes),
        )
        if not is_news or entry.num_grown >= MAX_GROWN:
            return self._append(entry, _bare_record(entry, IncidentStep.AGAIN)) if entry.incident.is_quiet else None
        entry.num_grown += 1
        return self._append(entry, _record(entry.incident.number, IncidentStep.GREW, one, now_s))

    def _append(self, entry: _Followed, record: IncidentRecord) -> IncidentRecord:
        entry.incident = fold(entry.incident, record)
        return record

    def _forget(self, now_s: float) -> None:
        for component, entry in list(self._followed.items()):
            if not entry.incident.is_open and now_s - entry.seen_s > SAME_S:
                del self._followed[component]


def _first(causes: tuple[FoundCause, ...]) -> tuple[str, str] | None:
    return (causes[0].component, causes[0].kind) if causes else None


def _bounded(evidence: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(words[:MAX_WORDS_CHARS] for words in evidence[:MAX_EVIDENCE])


def _record(number: int, step: IncidentStep, one: Suspicion, now_s: float) -> IncidentRecord:
    return IncidentRecord(
        number=number,
        step=step,
        at_s=now_s,
        component=one.component,
        role=one.role,
        kind=one.kind,
        since_s=min(one.since_s, now_s),
        sentence=one.sentence[:MAX_WORDS_CHARS],
        score=one.score,
        evidence=_bounded(one.evidence),
        causes=one.causes[:MAX_CAUSES],
    )


def _bare_record(
    entry: _Followed, step: IncidentStep, score: float = 0.0, evidence: tuple[str, ...] = ()
) -> IncidentRecord:
    """Return a record without a finding, at the time of the last finding."""
    incident = entry.incident
    return IncidentRecord(
        number=incident.number,
        step=step,
        at_s=entry.seen_s,
        component=incident.component,
        since_s=incident.since_s,
        score=score,
        evidence=evidence,
    )
