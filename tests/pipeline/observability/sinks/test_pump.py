"""Claims about what a sink is given: each row once, whatever stops and starts again."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace

from pipeline.files.records import RecordFile
from pipeline.observability.fleet_history import FLEET_HISTORY_NAME, FleetRow, RoleTime, fleet_history
from pipeline.observability.history import HISTORY_NAME, VALUE_HISTORY_NAME, Row, ValueRow, resume_history, run_history
from pipeline.observability.sinks import pump as pump_module
from pipeline.observability.sinks.points import Point
from pipeline.observability.sinks.pump import Pump, read_record, record_path
from pipeline.observability.sinks.seam import SinkFailed, SinkSpec
from pipeline.observability.sinks.tensorboard import TensorBoardSink
from tests.pipeline.observability.rows import evaluation_row, update_row, value_row
from tests.pipeline.observability.sinks.event_reader import read_events, standing


class Shelf:
    """A sink that keeps what it is given, for one that only appends; it can be away."""

    def __init__(self) -> None:
        self.id = ""
        self.opened: list[str] = []
        self.steps: list[tuple[str, int]] = []
        self.is_away = False
        self.ends: list[bool] = []

    def open(self, sink_id: str) -> Shelf:
        self._answer()
        self.opened.append(sink_id)
        self.id = "shelf-1"
        return self

    def write(self, points: Sequence[Point]) -> None:
        self._answer()
        self.steps += [(point.series, point.step) for point in points]

    def close(self, *, has_failed: bool) -> None:
        self.ends.append(has_failed)

    def _answer(self) -> None:
        if self.is_away:
            raise SinkFailed("no route to the shelf")


class Rows:
    """A run's history, as the learner and the value worker write it."""

    max_fleet_bytes = 1 << 20

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / HISTORY_NAME
        self._values = run_dir / VALUE_HISTORY_NAME

    def append(self, *rows: Row | FleetRow) -> None:
        for row in rows:
            if isinstance(row, FleetRow):
                fleet_history(self._path.parent, max_bytes=self.max_fleet_bytes).append(row)
                continue
            self._write(run_history(self._values if isinstance(row, ValueRow) else self._path), row)

    def go_back(self, last_version: int, *rows: Row) -> None:
        """The learner restarts from a checkpoint, and goes on."""
        self._write(resume_history(self._path, last_version=last_version), *rows)

    @staticmethod
    def _write(history: RecordFile[Row], *rows: Row) -> None:
        for row in rows:
            history.append(row)


def fleet_row_of(at_s: float, num_tokens: int) -> FleetRow:
    return FleetRow(at_s, 5.0, {"generator": RoleTime(1.0, {"input": 1.0}, num_tokens, 100)})


@pytest.fixture
def history(tmp_path: Path) -> Rows:
    return Rows(tmp_path)


def tensorboard(run_dir: Path) -> Pump:
    return Pump("tensorboard", run_dir, lambda sink_id: TensorBoardSink(SinkSpec(run_dir, "demo", sink_id, {})))


def test_rows_reach_tensorboard_once_by_their_axes(tmp_path: Path, history: Rows) -> None:
    pump = tensorboard(tmp_path)
    history.append(evaluation_row(0, 0, 0.25))
    history.append(update_row(1, accuracy=0.5))
    history.append(value_row(1))
    assert pump.turn(0.0)
    history.append(update_row(2, accuracy=0.75))
    history.append(fleet_row_of(2000.0, 400), fleet_row_of(2010.0, 450))
    assert pump.turn(2.0)
    assert pump.turn(4.0)
    pump.close()
    found = standing(tmp_path / "tensorboard")
    assert found["train/accuracy"] == {1: 0.5, 2: 0.75}
    assert found["eval/held-out/accuracy"] == {0: 0.25}
    assert set(standing(tmp_path / "tensorboard" / "value")["value/loss"]) == {1}
    assert standing(tmp_path / "tensorboard" / "fleet")["fleet/tokens_per_s/generator"] == {0: 80.0, 10: 90.0}


def test_a_resumed_supervisor_goes_on_where_the_last_one_ended(tmp_path: Path, history: Rows) -> None:
    for update in range(1, 4):
        history.append(update_row(update))
    first = tensorboard(tmp_path)
    first.turn(0.0)
    first.close()
    history.append(update_row(4))
    second = tensorboard(tmp_path)
    second.turn(0.0)
    second.close()
    assert set(standing(tmp_path / "tensorboard")["train/loss"]) == {1, 2, 3, 4}


def test_what_a_killed_process_wrote_beyond_its_record_is_not_there_twice(tmp_path: Path, history: Rows) -> None:
    history.append(update_row(1))
    first = tensorboard(tmp_path)
    first.turn(0.0)
    before = record_path(tmp_path, "tensorboard").read_bytes()
    history.append(update_row(2))
    first.turn(2.0)
    # killed between the write and its record
    record_path(tmp_path, "tensorboard").write_bytes(before)
    second = tensorboard(tmp_path)
    second.turn(0.0)
    second.close()
    first.close()
    assert set(standing(tmp_path / "tensorboard")["train/loss"]) == {1, 2}
    assert [event.step for event in read_events(tmp_path / "tensorboard") if event.is_restart] == [2]


@pytest.mark.parametrize("is_same_process", [True, False])
def test_updates_made_again_replace_those_that_were_given_up(
    tmp_path: Path, history: Rows, is_same_process: bool
) -> None:
    for update in range(1, 6):
        history.append(update_row(update, accuracy=0.25))
    pump = tensorboard(tmp_path)
    pump.turn(0.0)
    history.go_back(3, replace(update_row(4, accuracy=0.75, version=8), at_s=2000.0))
    if not is_same_process:
        pump.close()
        pump = tensorboard(tmp_path)
    pump.turn(2.0)
    history.append(replace(update_row(5, accuracy=0.75, version=9), at_s=2001.0))
    pump.turn(4.0)
    pump.close()
    found = standing(tmp_path / "tensorboard")["train/accuracy"]
    assert found == {1: 0.25, 2: 0.25, 3: 0.25, 4: 0.75, 5: 0.75}


def test_a_sink_that_only_appends_gets_each_step_once_though_updates_are_repeated(
    tmp_path: Path, history: Rows
) -> None:
    shelf = Shelf()
    pump = Pump("shelf", tmp_path, shelf.open)
    for update in range(1, 4):
        history.append(update_row(update))
    history.append(evaluation_row(1, 3, 0.5))
    pump.turn(0.0)
    history.go_back(1, replace(update_row(2, version=5), at_s=2000.0))
    pump.turn(2.0)
    history.append(replace(update_row(3, version=6), at_s=2001.0))
    history.append(replace(update_row(4, version=7), at_s=2002.0))
    pump.turn(4.0)
    assert shelf.steps == [("update", 1), ("update", 2), ("update", 3), ("evaluation/held-out", 3), ("update", 4)]


def test_a_resumed_run_continues_the_same_run_of_a_sink(tmp_path: Path, history: Rows) -> None:
    history.append(update_row(1))
    first, second = Shelf(), Shelf()
    Pump("shelf", tmp_path, first.open).turn(0.0)
    history.append(update_row(2))
    Pump("shelf", tmp_path, second.open).turn(0.0)
    assert (first.opened, second.opened) == ([""], ["shelf-1"])
    assert second.steps == [("update", 2)]


def test_a_sink_that_is_away_gets_everything_later_and_is_asked_ever_more_seldom(tmp_path: Path, history: Rows) -> None:
    shelf = Shelf()
    shelf.is_away = True
    pump = Pump("shelf", tmp_path, shelf.open)
    history.append(update_row(1))
    tried, now = [], 0.0
    while now < 1000.0:
        before = pump._next_s
        pump.turn(now)
        tried += [pump._next_s - now] if pump._next_s != before else []
        now += 1.0
    assert tried == [5, 10, 20, 40, 80, 160, 300, 300, 300]
    assert read_record(tmp_path, "shelf").trouble == "no route to the shelf"
    history.append(update_row(2))
    shelf.is_away = False
    assert pump.turn(now, at_once=True)
    assert shelf.steps == [("update", 1), ("update", 2)]
    assert read_record(tmp_path, "shelf").trouble == ""


def test_a_failure_opens_the_sink_again_and_repeats_what_it_had_not_taken(tmp_path: Path, history: Rows) -> None:
    shelf = Shelf()
    pump = Pump("shelf", tmp_path, shelf.open)
    history.append(update_row(1))
    pump.turn(0.0)
    shelf.is_away = True
    history.append(update_row(2))
    assert not pump.turn(2.0)
    assert shelf.ends == [True], "a failed client is closed"
    shelf.is_away = False
    assert not pump.turn(3.0), "its pause is not over"
    assert pump.turn(8.0)
    assert shelf.steps == [("update", 1), ("update", 2)]
    pump.close(has_failed=False)
    assert shelf.ends == [True, False]


def test_rows_of_the_fleet_are_not_repeated_when_its_history_is_thinned(tmp_path: Path, history: Rows) -> None:
    history.max_fleet_bytes = 4_000
    pump = tensorboard(tmp_path)
    for number in range(60):
        history.append(fleet_row_of(1e9 + 5 * number, 10 * number))
        pump.turn(2.0 * number)
    pump.close()
    lines = (tmp_path / FLEET_HISTORY_NAME).read_text().splitlines()
    assert len(lines) < 60, "the file was thinned"
    assert list(standing(tmp_path / "tensorboard" / "fleet")["fleet/tokens_per_s/generator"]) == [
        5 * number for number in range(60)
    ]


def test_a_long_history_is_read_in_pieces_and_damaged_lines_are_left_out(
    tmp_path: Path, history: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pump_module, "_MAX_READ", 3)
    history.append(*(update_row(n) for n in range(1, 20)))
    with (tmp_path / HISTORY_NAME).open("ab") as file:
        file.write(b"{not a row\n[1]\n" + b'{"kind": "update"}\n')
    history.append(update_row(20))
    shelf = Shelf()
    assert Pump("shelf", tmp_path, shelf.open).turn(0.0)
    assert shelf.steps == [("update", n) for n in range(1, 21)]


def test_a_folder_that_cannot_be_written_is_a_trouble_and_no_crash(tmp_path: Path, history: Rows) -> None:
    (tmp_path / "tensorboard").write_text("a file where the folder should be")
    history.append(update_row(1))
    pump = tensorboard(tmp_path)
    assert not pump.turn(0.0)
    assert "tensorboard cannot be written" in read_record(tmp_path, "tensorboard").trouble
    (tmp_path / "tensorboard").unlink()
    assert pump.turn(10.0)
    pump.close()
    assert set(standing(tmp_path / "tensorboard")["train/loss"]) == {1}
