"""``headrace fleet incidents``: the list and one incident, of a run's folder alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from pipeline.cli import headrace
from pipeline.config import RESOLVED_NAME
from pipeline.fleet.incidents.book import IncidentBook, Suspicion
from pipeline.fleet.incidents.records import FoundCause, RunIncidents, incident_records
from pipeline.fleet.repair.records import RepairRow, repair_records


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "one"
    (folder / "logs").mkdir(parents=True)
    (folder / RESOLVED_NAME).write_text("")
    book, file = IncidentBook(), incident_records(folder)
    cause = FoundCause(component="reward-0", kind="hung", confidence=0.9, evidence=("3 chunks wait, none is judged",))
    first = Suspicion(
        "reward-0", "hung", 1e9, "holds 3 chunks\x1b[2J for 9 s, 8 s are allowed", "reward", causes=(cause,)
    )
    file.append(*book.update(1e9 + 9.0, [first]))
    file.append(
        *book.add_stacks("reward-0", ("reward-0 stands in compute\x1b: judge (rules.py:3)", "reward-1 stands in main"))
    )
    file.append(*book.update(1e9 + 60.0, [Suspicion("generator-1", "slow", 1e9 + 50.0, "takes 4 times as long")]))
    log = {"event": "worker_replaced", "at": "2001-09-09T01:46:55Z", "level": "error", "worker": "reward-0"}
    (folder / "logs" / "supervisor.jsonl").write_text(
        json.dumps(log | {"reason": "stuck for 12 s", "stands": ["reward-0 stands in main: spin"]}) + "\n"
    )
    return folder


def command(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(headrace, ["fleet", "incidents", *arguments])
    return result.exit_code, result.output if result.exception is None else f"{result.output}{result.exception}"


def test_the_list_has_a_line_an_incident_with_its_cause(run_dir: Path) -> None:
    code, shown = command("list", str(run_dir))
    head, first, second = shown.splitlines()
    assert code == 0
    assert head.split() == ["number", "state", "since", "lasted", "component", "kind", "cause"]
    assert first.split()[1:2] + first.split()[-4:] == ["ended", "reward-0", "hung", "reward-0", "hung"]
    assert second.split()[1:2] + second.split()[-3:] == ["open", "generator-1", "slow", "–"]
    assert "reward-0" not in command("list", str(run_dir), "--open")[1]


def test_an_open_incident_that_is_not_found_now_is_called_quiet(run_dir: Path) -> None:
    book = IncidentBook(RunIncidents(run_dir).read(), 1e9 + 60.0)
    incident_records(run_dir).append(*book.update(1e9 + 63.0, []))
    assert command("list", str(run_dir), "--open")[1].splitlines()[1].split()[1:2] == ["quiet"]
    assert "open, but quiet at the moment" in command("show", "2", str(run_dir))[1]


def test_one_incident_is_shown_with_evidence_and_what_the_supervisor_did(run_dir: Path) -> None:
    code, shown = command("show", "1", str(run_dir))
    assert code == 0
    assert "3 chunks wait, none is judged" in shown
    assert "was replaced: stuck for 12 s; reward-0 stands in main: spin" in shown
    assert "judge (rules.py:3)" in shown and "reward-1 stands in main" in shown
    assert "\x1b" not in shown


def test_one_incident_is_shown_with_the_repairs_in_its_time_by_their_parts(run_dir: Path) -> None:
    for at_s, worker in ((1e9 + 18.0, "reward-0"), (1e9 + 18.0, "reward-1"), (1e9 + 9000.0, "reward-0")):
        repair_records(run_dir).append(RepairRow(at_s, worker, "reward", "stuck", 12.0, 1.0, 2.5, 0.0, localise_s=0.5))
    code, shown = command("show", "1", str(run_dir))
    assert code == 0
    (line,) = [line for line in shown.splitlines() if "works again" in line]
    assert line.endswith(
        "reward-0: works again, after 16.0 s: detect 12.0 s, localise 0.5 s, replace 1.0 s, reload 2.5 s"
    )


def test_json_has_the_records(run_dir: Path) -> None:
    listed = json.loads(command("list", str(run_dir), "--json")[1])
    assert [one["number"] for one in listed["incidents"]] == [1, 2]
    shown = json.loads(command("show", "1", str(run_dir), "--json")[1])
    assert [record["step"] for record in shown["incident"]["records"]] == ["opened", "stood", "ended"]
    assert [row["worker"] for row in shown["supervisor"]] == ["reward-0"]


def test_an_unknown_number_is_answered_by_those_that_exist(run_dir: Path) -> None:
    code, shown = command("show", "9", str(run_dir))
    assert code != 0
    assert "1 to 2" in shown


def test_a_run_without_incidents_has_none(run_dir: Path) -> None:
    (run_dir / "incidents.jsonl").unlink()
    assert "has no incident" in command("list", str(run_dir))[1]
