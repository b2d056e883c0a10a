"""Claims about tables of any fleet, and the command that reads them."""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Sequence
from dataclasses import fields, replace
from itertools import pairwise
from math import isnan
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from pipeline.cli.trace import trace
from pipeline.fleet.flow.offline import given_rows, read_flow_tables, replay, spacing_s
from pipeline.fleet.flow.rows import FlowIncident, LinkRow, StateRow
from pipeline.fleet.flow.watcher import FlowWatch
from protocol.errors import DataError
from tests.pipeline.fleet.flow.made_fleet import MadeFleet, blamed

UNTIL_S = 110


def cells(rows: Sequence[Any], *, every_s: int = 1) -> tuple[list[str], list[list[object]]]:
    columns = [field.name for field in fields(rows[0])]
    found = [[getattr(row, column) for column in columns] for row in rows if int(row.time_s) % every_s == 0]
    return columns, [["" if isinstance(cell, float) and isnan(cell) else cell for cell in row] for row in found]


def rows_of(fleet: MadeFleet) -> tuple[list[StateRow], list[LinkRow]]:
    seconds = range(UNTIL_S)
    return [row for at in seconds for row in fleet.states(at)], [row for at in seconds for row in fleet.links(at)]


def write(path: Path, columns: list[str], rows: list[list[object]]) -> Path:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([columns, *rows])
    return path


@pytest.fixture
def broken() -> MadeFleet:
    fleet = MadeFleet()
    fleet.hang("reward-1", input_depth=4)
    return fleet


class Noted(FlowWatch):
    """Remembers the times of its ticks."""

    def __init__(self) -> None:
        super().__init__()
        self.times_s: list[float] = []

    def tick(self, now_s: float, states: Sequence[StateRow], links: Sequence[LinkRow]) -> list[FlowIncident]:
        self.times_s.append(now_s)
        return super().tick(now_s, states, links)


def test_pieces_of_a_table_are_replayed_without_going_back_in_time(tmp_path: Path) -> None:
    states, _ = rows_of(MadeFleet())
    watch, pieces = Noted(), list[Path]()
    for at in range(0, UNTIL_S, 10):
        piece = [replace(row, time_s=row.time_s + 0.3) for row in states if at <= row.time_s < at + 10]
        pieces.append(write(tmp_path / f"{at}.csv", *cells(piece, every_s=1)))
    assert replay((row for path in pieces for row in given_rows(read_flow_tables([path]))), watch) == []
    assert all(after - before == pytest.approx(1.0) for before, after in pairwise(watch.times_s))
    assert len(watch.times_s) == UNTIL_S + 1


def found_in(*paths: Path) -> list[tuple[str, str]]:
    tables = read_flow_tables(paths)
    return blamed(replay(given_rows(tables), FlowWatch(), spacing_s(tables)))


def test_csv_and_parquet_of_a_folder_give_what_the_live_rows_gave(tmp_path: Path, broken: MadeFleet) -> None:
    states, links = rows_of(broken)
    write(tmp_path / "states.csv", *cells(states))
    columns = {name: [getattr(row, name) for row in links] for name in ("time_s", "sender", "receiver", "produced")}
    columns |= {name: [getattr(row, name) for row in links] for name in ("sent", "received", "done")}
    pq.write_table(pa.table(columns), tmp_path / "links.parquet")
    (tmp_path / "notes.txt").write_text("not a table")
    assert found_in(tmp_path) == blamed(broken.incidents()) == [("reward-1", "stuck")]


def test_rows_out_of_order_and_twice_change_nothing(tmp_path: Path, broken: MadeFleet) -> None:
    states, _ = rows_of(broken)
    columns, rows = cells(states)
    rows = rows + rows[:50]
    random.Random(3).shuffle(rows)
    assert found_in(write(tmp_path / "s.csv", columns, rows)) == [("reward-1", "stuck")]


@pytest.mark.parametrize("every_s", [2, 5])
def test_other_intervals_find_the_same(tmp_path: Path, every_s: int) -> None:
    fleet = MadeFleet()
    fleet.hang("reward-1", input_depth=4)
    states = [row for at in range(200) for row in fleet.states(at)]
    assert found_in(write(tmp_path / "s.csv", *cells(states, every_s=every_s))) == [("reward-1", "stuck")]


def test_other_roles_and_few_columns_are_enough(tmp_path: Path, broken: MadeFleet) -> None:
    states, _ = rows_of(broken)
    rows = [[row.time_s, f"host:{row.worker}", row.done, row.waiting_for, "blue"] for row in states]
    path = write(tmp_path / "s.csv", ["TIME_S", "Worker", "done", "waiting_for", "colour"], rows)
    tables = read_flow_tables([path])
    assert blamed(replay(given_rows(tables), FlowWatch())) == [("host:reward-1", "stuck")]
    assert any("not read: colour" in note for note in tables.notes)
    assert any("no column in_flight" in note for note in tables.notes)


def test_a_worker_with_a_clock_of_its_own_does_not_make_the_replay_endless(tmp_path: Path) -> None:
    rows = [[float(at), "a", at, "compute"] for at in range(50)]
    rows += [[1.7e9 + at, "b", at, "compute"] for at in range(50)]
    assert found_in(write(tmp_path / "s.csv", ["time_s", "worker", "done", "waiting_for"], rows)) == []


def test_what_is_no_table_of_a_fleet_is_refused_with_what_is_expected(tmp_path: Path) -> None:
    path = write(tmp_path / "x.csv", ["a", "b"], [[1, 2]])
    with pytest.raises(DataError, match=r"x.csv has a, b; expected time_s, worker, role, waiting_for"):
        read_flow_tables([path])
    bad = write(tmp_path / "s.csv", ["time_s", "worker", "done"], [[1, "a", 1], [2, "a", "many"]])
    with pytest.raises(DataError, match="row 3, column done: 'many'; expected a number"):
        read_flow_tables([bad])


def test_the_command_prints_incidents_and_what_it_did_not_understand(tmp_path: Path, broken: MadeFleet) -> None:
    states, _ = rows_of(broken)
    columns, rows = cells(states)
    for row in rows:
        if row[1] == "reward-2":
            row[3] = "pondering"
    path = write(tmp_path / "s.csv", columns, rows)
    done = CliRunner().invoke(trace, ["--from", str(path)])
    assert done.exit_code == 0
    assert "1. reward-1: stuck" in done.stdout
    assert "finished nothing" in done.stdout
    assert "'pondering'" in done.stderr
    done = CliRunner().invoke(trace, ["--from", str(path), "--json"])
    (incident,) = json.loads(done.stdout)["incidents"]
    assert set(incident) == {"trigger_s", "named_s", "causes"}
    assert set(incident["causes"][0]) == {"component", "kind", "confidence", "evidence"}
    assert incident["causes"][0]["component"] == "reward-1"


def test_the_command_says_that_a_healthy_fleet_has_no_incident(tmp_path: Path) -> None:
    states, links = rows_of(MadeFleet())
    paths = [write(tmp_path / "s.csv", *cells(states)), write(tmp_path / "l.csv", *cells(links))]
    done = CliRunner().invoke(trace, ["--from", str(paths[0]), "--from", str(paths[1])])
    assert done.stdout.startswith("no incident")
