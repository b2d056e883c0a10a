"""Incidents on the disk: appended, read as they grow, bounded, and read past damage."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipeline.fleet.incidents.book import IncidentBook, Suspicion
from pipeline.fleet.incidents.records import INCIDENTS_NAME, RunIncidents, incident_records


def suspicion(component: str) -> Suspicion:
    return Suspicion(component, "slow", 1.0, f"{component} takes 4 times as long", evidence=("a", "b"))


def test_what_was_appended_is_read_once_and_later_records_change_it(tmp_path: Path) -> None:
    book, file, reader = IncidentBook(), incident_records(tmp_path), RunIncidents(tmp_path)
    assert reader.read() == ()
    file.append(*book.update(10.0, [suspicion("reward-0")]))
    assert [(one.component, one.is_open) for one in reader.read()] == [("reward-0", True)]
    file.append(*book.update(60.0, []))
    (only,) = reader.read()
    assert (only.is_open, only.ended_s, only.records[0].evidence) == (False, 10.0, ("a", "b"))


def test_a_full_file_keeps_what_is_open_and_the_newest_of_what_has_ended(tmp_path: Path) -> None:
    book, file, early = IncidentBook(), incident_records(tmp_path, max_bytes=4000), RunIncidents(tmp_path)
    file.append(*book.update(1.0, [suspicion("learner")]))
    for number in range(30):
        for later_s in (0.0, 45.0):
            found = [suspicion("learner"), *([suspicion(f"reward-{number}")] if not later_s else [])]
            file.append(*book.update(2.0 + 90.0 * number + later_s, found))
        early.read()
        assert (tmp_path / INCIDENTS_NAME).stat().st_size <= 4000
    learner, *ended = RunIncidents(tmp_path).read()
    assert (learner.component, learner.is_open) == ("learner", True)
    assert [one.component for one in ended] == [f"reward-{number}" for number in range(30 - len(ended), 30)]
    assert 3 < len(ended) < 20
    assert [one.number for one in early.read()] == list(range(1, 32)), "a reader from the start knows them all"
    assert early.read()[0].records == learner.records


def test_the_end_of_an_incident_is_kept_when_its_file_gives_way(tmp_path: Path) -> None:
    book, file = IncidentBook(), incident_records(tmp_path, max_bytes=200)
    file.append(*book.update(1.0, [suspicion("learner")]))
    file.append(*book.update(50.0, []))
    assert [one.is_open for one in RunIncidents(tmp_path).read()] == [False]


@pytest.mark.parametrize("wrong", [{"number": 0}, {"component": ""}, {"at_s": "NaN"}, {"since_s": "Infinity"}])
def test_a_record_without_a_number_a_component_or_a_time_is_skipped_and_counted(
    tmp_path: Path, wrong: dict[str, object]
) -> None:
    record = {"number": 1, "step": "opened", "at_s": 1.0, "component": "learner"} | wrong
    (tmp_path / INCIDENTS_NAME).write_text(json.dumps(record) + "\n")
    reader = RunIncidents(tmp_path)
    assert (reader.read(), reader.num_skipped) == ((), 1)
