"""Incidents: ends and restarts of workers, from the supervisor's log."""

from __future__ import annotations

import json
from pathlib import Path

from pipeline.fleet.incidents.book import IncidentBook, Suspicion
from pipeline.fleet.incidents.records import incident_records
from pipeline.observability.incidents import IncidentReader


def log(run_dir: Path, *lines: dict[str, object] | str) -> None:
    path = run_dir / "logs" / "supervisor.jsonl"
    path.parent.mkdir(exist_ok=True)
    with path.open("a") as file:
        for line in lines:
            file.write((line if isinstance(line, str) else json.dumps(line)) + "\n")


def line(
    event: str, second: int, *, level: str = "info", worker: str = "supervisor", **more: object
) -> dict[str, object]:
    at = f"2026-01-01T00:00:{second:02d}.000000Z"
    return {"event": event, "at": at, "level": level, "worker": worker, "role": "supervisor", "run": "op", **more}


def test_an_end_and_the_restart_after_it_are_incidents_and_a_first_start_is_none(tmp_path: Path) -> None:
    log(
        tmp_path,
        line("worker_started", 1, worker="reward-0", pid=3),
        line("worker_exited", 10, level="warning", worker="reward-0", exit_code=-9, meaning="killed by SIGKILL"),
        line("worker_started", 11, worker="reward-0", pid=4),
        line("worker_replaced", 20, level="error", worker="generator-0", reason="silent for 12 s"),
        line("ledger_disk_full", 30, level="error", reason="no room"),
    )
    found = IncidentReader(tmp_path).read()
    assert [(incident.worker, incident.words) for incident in found] == [
        ("reward-0", "ended (killed by SIGKILL)"),
        ("reward-0", "was started again after 1.0 s"),
        ("generator-0", "was replaced: silent for 12 s"),
        ("supervisor", "ledger disk full reason=no room"),
    ]


def test_only_new_lines_are_read_and_a_damaged_one_is_skipped(tmp_path: Path) -> None:
    reader = IncidentReader(tmp_path, max_incidents=3)
    assert reader.read() == ()
    log(tmp_path, "{torn", line("worker_exited", 1, level="warning", worker="a", meaning="error"))
    assert len(reader.read()) == 1
    for second in range(2, 9):
        log(tmp_path, line("worker_exited", second, level="warning", worker=f"a-{second}", meaning="error"))
    assert [incident.worker for incident in reader.read()] == ["a-6", "a-7", "a-8"]
    assert [incident.worker for incident in reader.read()] == ["a-6", "a-7", "a-8"]


def test_what_a_worker_names_cannot_act_on_the_terminal(tmp_path: Path) -> None:
    log(tmp_path, line("worker_exited", 1, level="warning", worker="a\x1b[2J", meaning="\x1b]0;x\x07", error="\nroot"))
    (incident,) = IncidentReader(tmp_path).read()
    assert "\x1b" not in incident.worker + incident.words
    assert "\n" not in incident.words


def test_a_finding_of_a_hung_worker_has_where_it_stands(tmp_path: Path) -> None:
    book, file = IncidentBook(), incident_records(tmp_path)
    file.append(*book.update(1e9, [Suspicion("reward-0", "hung", 1e9, "its loop stands", "reward")]))
    file.append(*book.add_stacks("reward-0", ("reward-0 stands in main: spin (odd.py:3)", "reward-1 moves")))
    (row,) = IncidentReader(tmp_path).read()
    assert row.words == "incident 1: its loop stands; reward-0 stands in main: spin (odd.py:3)"


def test_the_words_of_a_finding_leave_out_the_worker_that_stands_beside_them(tmp_path: Path) -> None:
    incident_records(tmp_path).append(
        *IncidentBook().update(1e9, [Suspicion("reward-0", "slow", 1e9, "reward-0 takes 1.7 times as long", "reward")])
    )
    (row,) = IncidentReader(tmp_path).read()
    assert (row.worker, row.words) == ("reward-0", "incident 1: takes 1.7 times as long")


def test_a_change_of_the_settings_stands_among_the_incidents(tmp_path: Path) -> None:
    sets = {"learner.learning_rate": "3e-4"}
    log(tmp_path, line("settings_changed", 5, number=2, sets=sets, by="ann@a", reason="noisy"))
    (row,) = IncidentReader(tmp_path).read()
    assert (row.level, row.worker) == ("info", "supervisor")
    assert row.words == "change 2 of the settings: learner.learning_rate 3e-4, by ann@a: noisy"
