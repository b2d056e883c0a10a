"""Claims about the list of a folder's runs."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from msgspec.structs import replace

from pipeline.cli import headrace
from pipeline.observability.history import HISTORY_NAME, Row, resume_history, run_history
from pipeline.observability.start_record import EndRow, StartRow, start_records
from pipeline.operator.runs import KeptFiles, ListedRun, list_runs
from pipeline.supervisor.pulse import Pulse
from pipeline.supervisor.run_folder import run_lock
from protocol.errors import ConfigError
from tests.pipeline.cli.probe import run_command
from tests.pipeline.observability.rows import evaluation_row, update_row

SETTINGS = '[run]\nseed = 5\nnum_updates = 50\n[algorithm]\nname = "dapo"\n[model]\npath = "/models/small"\n'


def made(folder: Path, *, num_updates: int = 0, accuracies: tuple[float, ...] = ()) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(SETTINGS)
    history = run_history(folder / HISTORY_NAME)
    for number, accuracy in enumerate(accuracies):
        history.append(evaluation_row(number, number, accuracy))
    for update in range(1, num_updates + 1):
        history.append(update_row(update))
    return folder


def only(folder: Path, now_s: float | None = None) -> ListedRun:
    (row,) = list_runs(folder, now_s)
    return row


def test_a_run_that_ended_has_its_course_and_its_times(tmp_path: Path) -> None:
    run = made(tmp_path / "a", num_updates=3, accuracies=(0.25, 0.875, 0.75))
    start_records(run).append(StartRow(at_s=100.0))
    start_records(run).append(EndRow(at_s=160.0, state="stopping", detail="stopped"))
    start_records(run).append(StartRow(at_s=500.0))
    start_records(run).append(EndRow(at_s=530.0, state="finished", detail="3 updates done"))
    row = only(tmp_path)
    assert (row.state, row.detail) == ("finished", "3 updates done")
    assert (row.num_updates, row.num_wanted, row.seed) == (3, 50, 5)
    assert (row.accuracy_first, row.accuracy_last, row.accuracy_best) == (0.25, 0.75, 0.875)
    assert (row.started_s, row.ended_s, row.took_s) == (100.0, 530.0, 90.0), "the time between is not counted"
    assert (row.algorithm, row.model) == ("dapo", "/models/small")


def test_evaluations_of_other_sets_do_not_count(tmp_path: Path) -> None:
    run = made(tmp_path / "a", accuracies=(0.25,))
    history = run_history(run / HISTORY_NAME)
    history.append(replace(evaluation_row(1, 1, 0.99), set="other", is_main=False))
    assert only(tmp_path).accuracy_last == 0.25


def test_a_running_run_is_told_from_one_that_died(tmp_path: Path) -> None:
    run = made(tmp_path / "a", num_updates=1)
    start_records(run).append(StartRow(at_s=1_000.0))
    with run_lock(run):
        assert only(tmp_path).state == "starting"
        Pulse(run).beat(0.0, is_ready=True)
        row = only(tmp_path, now_s=1_250.0)
        assert (row.state, row.ended_s, row.took_s) == ("running", None, 250.0)
    died = only(tmp_path)
    assert died.state == "died"
    assert "headrace up --resume" in died.detail


def test_a_run_that_drains_is_stopping(tmp_path: Path) -> None:
    run = made(tmp_path / "a")
    with run_lock(run):
        Pulse(run).beat(0.0, is_ready=False)
        history = run_history(run / HISTORY_NAME)
        history.append(replace(update_row(1), at_s=time.time() + 1.0))
        assert only(tmp_path).state == "stopping"


def test_runs_of_earlier_versions_are_listed_without_a_record_of_their_starts(tmp_path: Path) -> None:
    made(tmp_path / "old", num_updates=3, accuracies=(0.5,))
    made(tmp_path / "unused")
    rows = {row.run.name: row for row in list_runs(tmp_path)}
    assert rows["old"].state == "ended"
    assert (rows["old"].started_s, rows["old"].num_updates) == (1000.0, 3)
    assert rows["unused"].state == "new"


def test_damage_is_skipped_and_counted_and_hides_no_other_run(tmp_path: Path) -> None:
    run = made(tmp_path / "a", num_updates=2, accuracies=(0.25,))
    with (run / HISTORY_NAME).open("ab") as file:
        file.write(b'{"kind": "evaluation", "accuracy": \n{"kind": "update", "upd\n')
    made(tmp_path / "b")
    (tmp_path / "b" / "config.toml").write_text("[run\n")
    rows = {row.run.name: row for row in list_runs(tmp_path)}
    assert (rows["a"].num_updates, rows["a"].accuracy_last, rows["a"].num_skipped) == (2, 0.25, 2)
    assert rows["b"].state == "unreadable"
    shown = CliRunner().invoke(headrace, ["run", "list", str(tmp_path)]).output
    assert "a: 2 lines of its records skipped, damaged" in shown
    assert "b: " in shown


def test_the_newest_run_is_first(tmp_path: Path) -> None:
    for name, at_s in (("a", 10.0), ("b", 30.0), ("c", 20.0)):
        start_records(made(tmp_path / name)).append(StartRow(at_s=at_s))
    assert [row.run.name for row in list_runs(tmp_path)] == ["b", "c", "a"]


def test_a_folder_without_runs_is_answered_with_what_exists(tmp_path: Path) -> None:
    made(tmp_path / "runs" / "demo")
    with pytest.raises(ConfigError, match="there are runs in"):
        list_runs(tmp_path)
    with pytest.raises(ConfigError, match=r"has the runs demo"):
        list_runs(tmp_path / "runs" / "dmeo")
    with pytest.raises(ConfigError, match="holds no run"):
        list_runs(_empty(tmp_path))


def _empty(folder: Path) -> Path:
    (folder / "empty").mkdir()
    return folder / "empty"


def test_the_command_prints_a_line_a_run_and_json(tmp_path: Path) -> None:
    run = made(tmp_path / "demo", num_updates=2, accuracies=(0.402, 0.965))
    start_records(run).append(StartRow(at_s=100.0))
    start_records(run).append(EndRow(at_s=308.0, state="finished"))
    done = CliRunner().invoke(headrace, ["run", "list", str(tmp_path)])
    assert len(done.output.splitlines()) == 2, "none is wrapped"
    for words in ("demo", "finished", "2 of 50", "40.2 % → 96.5 %", "3 min 28 s", "dapo", "models/small"):
        assert words in done.output
    found: list[dict[str, Any]] = json.loads(
        CliRunner().invoke(headrace, ["run", "list", str(tmp_path), "--json"]).output
    )
    assert found[0]["accuracy_last"] == 0.965


def test_a_list_asks_no_server_and_imports_nothing_heavy(tmp_path: Path) -> None:
    made(tmp_path / "demo", num_updates=2)
    (tmp_path / "demo" / "ledger.json").write_text("{}")
    _, code, modules = run_command(["run", "list", str(tmp_path)])
    assert code == 0
    assert not {"torch", "redis", "zmq", "pydantic", "transformers"} & set(modules)


def test_hundreds_of_runs_are_listed_from_few_lines_of_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made(tmp_path / "long", num_updates=2000, accuracies=(0.1, 0.2))
    parsed = 0
    loads = json.loads

    def counting(text: bytes) -> Any:
        nonlocal parsed
        parsed += 1
        return loads(text)

    monkeypatch.setattr(json, "loads", counting)
    row = only(tmp_path)
    assert (row.num_updates, row.accuracy_last) == (2000, 0.2)
    assert parsed < 8


def test_the_time_of_a_run_without_an_end_goes_to_its_last_sign_of_life(tmp_path: Path) -> None:
    run = made(tmp_path / "a")
    start_records(run).append(StartRow(at_s=1_000.0))
    Pulse(run).beat(0.0, is_ready=True)
    os.utime(run / "pulse", (1_400.0, 1_400.0))
    row = only(tmp_path)
    assert (row.state, row.ended_s, row.took_s) == ("died", 1_400.0, 400.0)


def added(run: Path, *rows: Row) -> None:
    history = run_history(run / HISTORY_NAME)
    for row in rows:
        history.append(row)


def overwritten(run: Path) -> None:
    """Make a history's present lines unreadable; their number and lengths stay."""
    path = run / HISTORY_NAME
    with path.open("r+b") as file:
        file.write(b"\n".join(b"?" * len(line) for line in path.read_bytes().split(b"\n")))


def test_of_a_history_that_grew_only_the_new_lines_are_read(tmp_path: Path) -> None:
    still, grows = (made(tmp_path / name, num_updates=2, accuracies=(0.25,)) for name in ("still", "grows"))
    kept = KeptFiles()
    first = {row.run: row for row in list_runs(tmp_path, 100.0, kept)}
    for run in (still, grows):
        overwritten(run)
    added(grows, update_row(3), replace(evaluation_row(1, 3, 0.5), at_s=2000.0))
    rows = {row.run: row for row in list_runs(tmp_path, 100.0, kept)}
    assert rows[still] == first[still]
    assert (rows[grows].num_updates, rows[grows].num_skipped) == (3, 0)
    assert (rows[grows].accuracy_first, rows[grows].accuracy_last) == (0.25, 0.5)
    assert (rows[grows].started_s, rows[grows].ended_s) == (1000.0, 2000.0)


def test_a_history_that_was_replaced_cut_short_or_removed_is_read_anew(tmp_path: Path) -> None:
    run = made(tmp_path / "a", num_updates=5, accuracies=(0.25, 0.5))
    kept = KeptFiles()
    list_runs(tmp_path, 100.0, kept)
    resume_history(run / HISTORY_NAME, last_version=3)
    (row,) = list_runs(tmp_path, 100.0, kept)
    assert (row.num_updates, row.accuracy_first, row.accuracy_last) == (3, 0.25, 0.5)
    lines = (run / HISTORY_NAME).read_bytes().splitlines(keepends=True)
    with (run / HISTORY_NAME).open("r+b") as file:
        file.truncate(len(lines[0]))
    (row,) = list_runs(tmp_path, 100.0, kept)
    assert (row.num_updates, row.accuracy_last) == (0, 0.25)
    (run / HISTORY_NAME).unlink()
    assert list_runs(tmp_path, 100.0, kept) == list_runs(tmp_path, 100.0)
    (row,) = list_runs(tmp_path, 100.0, kept)
    assert (row.state, row.accuracy_last) == ("new", None)


def test_a_list_made_again_and_again_is_the_list_made_once(tmp_path: Path) -> None:
    run = made(tmp_path / "a", accuracies=(0.25,))
    damaged = b'{"kind": "update", "upd\n', b'{"kind": "evaluation", "accuracy":\n', b'{"kind": "update"'
    kept = KeptFiles()
    for number in range(1, 9):
        with (run / HISTORY_NAME).open("ab") as file:
            file.write(damaged[number % 3])
            file.write(b"\n" if number % 2 else b"")
        if number % 3:
            added(run, update_row(number), evaluation_row(number, number, number / 10))
        assert list_runs(tmp_path, 100.0, kept) == list_runs(tmp_path, 100.0)
    (row,) = list_runs(tmp_path, 100.0, kept)
    assert (row.num_updates, row.accuracy_last) == (8, 0.8)
    assert row.num_skipped == 8
