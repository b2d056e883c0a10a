"""Incidents on the disk: appended, read as they grow, bounded, and read past damage."""

from __future__ import annotations

from pathlib import Path

from pipeline.fleet.incidents.book import IncidentBook, Suspicion
from pipeline.fleet.incidents.records import INCIDENTS_NAME, OLD_INCIDENTS_NAME, IncidentFile, RunIncidents


def suspicion(component: str) -> Suspicion:
    return Suspicion(component, "slow", 1.0, f"{component} takes 4 times as long", evidence=("a", "b"))


def test_what_was_appended_is_read_once_and_later_records_change_it(tmp_path: Path) -> None:
    book, file, reader = IncidentBook(), IncidentFile(tmp_path), RunIncidents(tmp_path)
    assert reader.read() == ()
    file.append(book.update(10.0, [suspicion("reward-0")]))
    assert [(one.component, one.is_open) for one in reader.read()] == [("reward-0", True)]
    file.append(book.update(60.0, []))
    (only,) = reader.read()
    assert (only.is_open, only.ended_s, only.records[0].evidence) == (False, 10.0, ("a", "b"))


def test_a_torn_or_damaged_line_is_skipped_and_counted(tmp_path: Path) -> None:
    book, file = IncidentBook(), IncidentFile(tmp_path)
    file.append(book.update(10.0, [suspicion("reward-0")]))
    with (tmp_path / INCIDENTS_NAME).open("ab") as raw:
        raw.write(b'{"number": "one"}\nnot json\n{"number": 7, "ste')
    file.append(book.update(11.0, [suspicion("reward-0"), suspicion("reward-1")]))
    reader = RunIncidents(tmp_path)
    assert [one.component for one in reader.read()] == ["reward-0", "reward-1"]
    assert reader.num_skipped == 3


def test_a_full_file_gives_way_to_a_new_one_that_still_has_what_is_open(tmp_path: Path) -> None:
    book, file, early = IncidentBook(), IncidentFile(tmp_path, max_bytes=2000), RunIncidents(tmp_path)
    file.append(book.update(1.0, [suspicion("learner")]), book.open)
    for number in range(30):
        now_s = 2.0 + number
        file.append(book.update(now_s, [suspicion("learner"), suspicion(f"reward-{number}")]), book.open)
        early.read()
    assert (tmp_path / INCIDENTS_NAME).stat().st_size < 8000
    assert (tmp_path / OLD_INCIDENTS_NAME).exists()
    late = RunIncidents(tmp_path).read()
    assert {one.component for one in late} == {"learner", *(f"reward-{number}" for number in range(30))}
    assert {one.number for one in early.read()} == set(range(1, 32))
    assert [one.records for one in late if one.number == 1] == [one.records for one in early.read() if one.number == 1]


def test_the_end_of_an_incident_is_kept_when_its_file_gives_way(tmp_path: Path) -> None:
    book, file = IncidentBook(), IncidentFile(tmp_path, max_bytes=200)
    file.append(book.update(1.0, [suspicion("learner")]), book.open)
    file.append(book.update(50.0, []), book.open)
    assert [one.is_open for one in RunIncidents(tmp_path).read()] == [False]
