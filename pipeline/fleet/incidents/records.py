"""Incidents and their records in ``<run_dir>/incidents.jsonl`` (``pipeline.files.records``).

An incident concerns one component: a worker, a link ``sender>receiver``, or the ledger. Its records
carry its number and are only ever appended: it opens, grows and ends, and may reopen under the same
number soon after. ``fold`` turns records into incidents.

The file is bounded: a full one keeps the open incidents and the newest half of the others. Earlier
releases renamed it to ``incidents.1.jsonl`` instead, which is read first."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Final

import msgspec

from pipeline.files.records import RecordFile, Schema

MAX_WORDS_CHARS: Final = 400
"""Maximum length of a sentence, in characters."""
MAX_EVIDENCE: Final = 8
"""Maximum number of evidence sentences in a record."""
MAX_CAUSES: Final = 3
_MAX_KEPT: Final = 20
"""Records of one incident kept in memory: its first and the newest."""


class IncidentStep(StrEnum):
    """What a record changes about its incident."""

    OPENED = "opened"
    GREW = "grew"
    """Another kind of fault or another cause was found."""
    STOOD = "stood"
    """Stacks of its worker and role were taken; they are the record's evidence."""
    QUIET = "quiet"
    """Nothing was found for a moment; the record has the time of the last finding."""
    AGAIN = "again"
    """It was found again before its end."""
    ENDED = "ended"
    """Nothing was found for a while; the record has the time of the last finding."""


_QUIET_OR_AGAIN: Final = frozenset({IncidentStep.QUIET, IncidentStep.AGAIN})
"""Steps of which an incident keeps only the newest."""


class FoundCause(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A worker or link that explains a stall."""

    component: str
    """A worker or ``sender>receiver``; for a deadlock, its workers joined by ``>``."""
    kind: str
    confidence: float = 0.0
    """From 0 to 1: how strong the evidence is, not a probability."""
    evidence: tuple[str, ...] = ()
    """Sentences, strongest first."""


class IncidentRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line of the file. Times are wall-clock seconds since 1970."""

    number: int
    """The incident's number; a run's first is 1."""
    step: IncidentStep
    at_s: float
    component: str
    """Worker, link ``sender>receiver``, or ``ledger``."""
    role: str = ""
    kind: str = ""
    """Such as ``silent``, ``hung`` or ``slow``."""
    since_s: float = 0.0
    """When the fault began, by the evidence."""
    sentence: str = ""
    """What was observed, compared with its limit."""
    score: float = 0.0
    evidence: tuple[str, ...] = ()
    causes: tuple[FoundCause, ...] = ()
    """Best first, at most ``MAX_CAUSES``."""

    def __post_init__(self) -> None:
        if self.number <= 0 or not self.component or not math.isfinite(self.at_s + self.since_s):
            raise ValueError("an incident has no number, no component or no time")

    @property
    def is_finding(self) -> bool:
        return self.step in (IncidentStep.OPENED, IncidentStep.GREW)


@dataclass(frozen=True, slots=True)
class Incident:
    """An incident as its records so far describe it."""

    number: int
    component: str
    role: str
    is_open: bool
    since_s: float
    opened_s: float
    ended_s: float | None
    """None while it is open."""
    kinds: tuple[str, ...]
    """Each kind once, in order of discovery."""
    sentence: str
    """The newest that is not empty."""
    causes: tuple[FoundCause, ...]
    """The newest known."""
    records: tuple[IncidentRecord, ...]
    """The first, and the newest others."""
    is_quiet: bool = False
    """Whether it is open but nothing has been found for a moment."""
    found_from_s: float = 0.0
    """When it was first found, or found again after being quiet."""
    found_s: float = 0.0
    """How long it was found before that, in seconds."""

    @property
    def kind(self) -> str:
        return self.kinds[0] if self.kinds else ""

    @property
    def stacks(self) -> tuple[str, ...]:
        """The newest stack report about its worker and role; empty if there is none."""
        stood = (record.evidence for record in reversed(self.records) if record.step is IncidentStep.STOOD)
        return next(stood, ())


def fold(incident: Incident | None, record: IncidentRecord) -> Incident:
    """Return the incident after one more record; ``incident`` is None for the first."""
    if incident is None:
        times = (record.since_s, record.at_s, None)
        incident = Incident(record.number, record.component, record.role, False, *times, (), "", (), ())
    kinds, before = incident.kinds, incident.records
    if record.step in _QUIET_OR_AGAIN:
        before = tuple(one for one in before if one.step not in _QUIET_OR_AGAIN)
    records = (*before, record)
    is_open = record.step is not IncidentStep.ENDED
    is_quiet, found_from_s, found_s = _findings_so_far(incident, record)
    return replace(
        incident,
        role=record.role or incident.role,
        is_open=is_open,
        ended_s=None if is_open else record.at_s,
        kinds=(*kinds, record.kind) if record.kind and record.kind not in kinds else kinds,
        sentence=record.sentence or incident.sentence,
        causes=record.causes or incident.causes,
        records=(records[0], *records[2:]) if len(records) > _MAX_KEPT else records,
        is_quiet=is_quiet,
        found_from_s=found_from_s,
        found_s=found_s,
    )


def _findings_so_far(incident: Incident, record: IncidentRecord) -> tuple[bool, float, float]:
    """Return ``is_quiet``, ``found_from_s`` and ``found_s`` after a record."""
    if not incident.is_open:
        return False, record.at_s, 0.0
    since_s, found_s = incident.found_from_s, incident.found_s
    if record.step is IncidentStep.QUIET and not incident.is_quiet:
        return True, since_s, found_s + max(0.0, record.at_s - since_s)
    if incident.is_quiet and (record.is_finding or record.step is IncidentStep.AGAIN):
        return False, record.at_s, found_s
    return incident.is_quiet and record.step is not IncidentStep.ENDED, since_s, found_s


INCIDENTS_NAME: Final = "incidents.jsonl"
OLD_INCIDENTS_NAME: Final = "incidents.1.jsonl"
MAX_FILE_BYTES: Final = 16 << 20
_MAX_KNOWN: Final = 10_000
_SCHEMA: Final[Schema[IncidentRecord]] = Schema(IncidentRecord)


def incident_records(
    run_dir: Path, name: str = INCIDENTS_NAME, *, max_bytes: int = MAX_FILE_BYTES
) -> RecordFile[IncidentRecord]:
    return RecordFile(run_dir / name, _SCHEMA, max_bytes=max_bytes, compact=_newest)


def _newest(records: Iterable[IncidentRecord]) -> list[IncidentRecord]:
    """Return the kept records of the open incidents and of the newest half of the others."""
    found: dict[int, Incident] = {}
    for record in records:
        found[record.number] = fold(found.get(record.number), record)
    ended = [number for number, incident in found.items() if not incident.is_open]
    for number in ended[: len(ended) // 2]:
        del found[number]
    return [record for incident in found.values() for record in incident.records]


class RunIncidents:
    """Reads a run's incidents as the file grows, in bounded memory."""

    def __init__(self, run_dir: Path) -> None:
        self._tails = [incident_records(run_dir, name).tail() for name in (OLD_INCIDENTS_NAME, INCIDENTS_NAME)]
        self._found: dict[int, Incident] = {}

    @property
    def num_skipped(self) -> int:
        return sum(tail.num_skipped for tail in self._tails)

    def read(self) -> tuple[Incident, ...]:
        """Return the newest 10,000 known incidents, oldest first. Raises OSError."""
        for tail in self._tails:
            for record in tail:
                incident = self._found.get(record.number)
                # A replaced file is read again.
                if incident is None or (record not in incident.records and record.at_s >= incident.records[-1].at_s):
                    self._found[record.number] = fold(incident, record)
        while len(self._found) > _MAX_KNOWN:
            del self._found[next(iter(self._found))]
        return tuple(self._found.values())
