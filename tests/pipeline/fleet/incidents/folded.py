"""Incidents from records."""

from __future__ import annotations

from collections.abc import Iterable

from pipeline.fleet.incidents.records import Incident, IncidentRecord, fold


def folded(records: Iterable[IncidentRecord]) -> dict[int, Incident]:
    """Return the incidents of these records by number, in opening order."""
    found: dict[int, Incident] = {}
    for record in records:
        found[record.number] = fold(found.get(record.number), record)
    return found
