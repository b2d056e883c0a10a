"""``headrace fleet watch RUN``, ``run trace RUN`` and ``run export --tables`` read a run's records again."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow.csv as arrow_csv
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result

from pipeline.cli import headrace
from pipeline.config import RESOLVED_NAME
from pipeline.fleet.flow.host_records import MESSAGES
from pipeline.fleet.flow.rows import StateRow
from pipeline.fleet.incidents.records import IncidentRecord, IncidentStep, incident_records
from pipeline.fleet.peers.frame import Frame
from pipeline.fleet.peers.segments import SegmentWriter
from pipeline.observability.history import HISTORY_NAME, run_history
from tests.pipeline.fleet.flow.made_fleet import BREAKS_S, MadeFleet, blamed
from tests.pipeline.fleet.peers.fleets import LEVELS, findings, fleet
from tests.pipeline.observability.rows import update_row

BEGAN_S = 1_700_000_000.0
UNTIL_S = 150
PIECE_S = 40


def slow(at_s: float, values: np.ndarray) -> None:
    if at_s >= BREAKS_S:
        values[3, list(LEVELS).index("service_ratio")] *= 6.0


def frames() -> list[Frame]:
    return list(fleet(seconds=UNTIL_S, change=slow))


def cells(row: Any, given_s: float) -> dict[str, Any]:
    found = {name: None if isinstance(cell, float) and np.isnan(cell) else cell for name, cell in asdict(row).items()}
    return found | {"time_s": row.time_s + BEGAN_S, "given_s": given_s}


def state_rows(made: MadeFleet, second: int, silent: str = "") -> list[StateRow]:
    """The rows of a moment; the last one of a silent worker is given again."""
    rows = {row.worker: row for row in made.states(second)}
    if silent and second >= BREAKS_S:
        rows[silent] = next(row for row in made.states(BREAKS_S - 1) if row.worker == silent)
    return list(rows.values())


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    run = tmp_path / "run"
    run.mkdir()
    (run / RESOLVED_NAME).touch()
    return run


def record(run_dir: Path, made: MadeFleet, silent: str = "") -> None:
    """Write what an observer leaves of a fleet, in several files of each table."""
    writer = SegmentWriter(run_dir, keep_bytes=1 << 30)
    for second, frame in enumerate(frames()):
        at_s = BEGAN_S + second
        done = [(at_s, "reward-0", "generator-0>reward-0", "stored", second, 50.0, 0.1, 0.25, 0.05, 1)]
        done += [(at_s, "reward-0", "generator-0>reward-0", "unstored", second, 50.0, 0.1, 0.25, 0.05, 1)]
        done += [(at_s, "generator-0", "generator-0>reward-0", "sent", second, 50.0, 0.1, 0.0, 0.0, 1)]
        done += [(at_s, "learner", "", "stored", second, 50.0, 0.1, 0.25, 0.05, 1)]
        tables: dict[str, Any] = {
            "states": [cells(row, at_s) for row in state_rows(made, second, silent)],
            "links": [cells(row, at_s) for row in made.links(second)],
            "messages": np.array(done, MESSAGES),
        }
        writer.add(at_s, frame, tables)
        if second % PIECE_S == PIECE_S - 1:
            writer.take()()
    writer.take()()
    history = run_history(run_dir / HISTORY_NAME)
    for update in (1, 2):
        history.append(
            msgspec.structs.replace(
                update_row(update), at_s=BEGAN_S + 30.0 * update, step_s=2.0, logprob_s=1.0, publish_s=0.5
            )
        )


def broken() -> MadeFleet:
    made = MadeFleet()
    made.hang("reward-1", input_depth=4)
    return made


def ran(*arguments: object, code: int = 0) -> Result:
    done = CliRunner().invoke(headrace, [str(word) for word in arguments])
    assert done.exit_code == code or (code == 2 and done.exception is not None), done.output
    return done


def found(*arguments: object) -> Any:
    done = CliRunner().invoke(headrace, [*map(str, arguments), "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def names(findings: Sequence[dict[str, Any]]) -> list[tuple[str, str, str]]:
    return [(one["worker"], one["kind"], one["metric"]) for one in findings]


def causes(incidents: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(one["causes"][0]["component"], one["causes"][0]["kind"]) for one in incidents]


def test_a_run_and_its_exported_tables_have_the_findings_of_the_live_frames(run_dir: Path, tmp_path: Path) -> None:
    record(run_dir, MadeFleet())
    live = findings(iter(frames()))
    assert [(one.worker, one.kind) for one in live] == [("generator-3", "slow")]
    inside = found("fleet", "watch", run_dir)["findings"]
    assert [(one["worker"], one["metric"], one["score"]) for one in inside] == [
        (one.worker, one.metric, pytest.approx(one.score, rel=1e-3)) for one in live
    ]
    assert inside[0]["alarm_s"] == BEGAN_S + live[0].alarm_s
    ran("run", "export", run_dir, "--tables", tmp_path / "plain")
    ran("run", "export", run_dir, "--tables", tmp_path / "text", "--csv")
    for folder in ("plain", "text"):
        outside = found("fleet", "watch", "--from", tmp_path / folder)["findings"]
        assert names(outside) == names(inside), folder
        assert outside[0]["alarm_s"] == pytest.approx(inside[0]["alarm_s"], abs=1.0)


def test_a_run_and_its_exported_tables_have_the_causes_of_the_live_rows(run_dir: Path, tmp_path: Path) -> None:
    record(run_dir, broken())
    live = [tuple(one) for one in blamed(broken().incidents(UNTIL_S))]
    inside = found("run", "trace", run_dir)["incidents"]
    assert causes(inside) == live == [("reward-1", "stuck")]
    assert BEGAN_S + BREAKS_S < inside[0]["named_s"] < BEGAN_S + BREAKS_S + 40
    ran("run", "export", run_dir, "--tables", tmp_path / "plain")
    ran("run", "export", run_dir, "--tables", tmp_path / "text", "--csv")
    for folder in ("plain", "text"):
        outside = found("run", "trace", "--from", tmp_path / folder)["incidents"]
        assert causes(outside) == live, folder
        assert outside[0]["named_s"] == pytest.approx(inside[0]["named_s"], abs=1.0)


def test_a_silent_worker_is_silent_in_a_recorded_run_too(run_dir: Path, tmp_path: Path) -> None:
    record(run_dir, MadeFleet(), silent="reward-1")
    for file in (run_dir / "observed").glob("links-*.parquet"):
        file.unlink()
    assert causes(found("run", "trace", run_dir)["incidents"]) == [("reward-1", "silent")]
    ran("run", "export", run_dir, "--tables", tmp_path / "out")
    assert causes(found("run", "trace", "--from", tmp_path / "out")["incidents"]) == [("reward-1", "silent")]
    states = tmp_path / "out" / "states.parquet"
    pq.write_table(pq.read_table(states).drop_columns(["given_s"]), states)
    assert found("run", "trace", "--from", tmp_path / "out")["incidents"] == [], "rows that end prove nothing"


def test_exported_work_is_the_scored_messages_and_the_updates(run_dir: Path, tmp_path: Path) -> None:
    record(run_dir, MadeFleet())
    done = ran("run", "export", run_dir, "--tables", tmp_path / "out", "--csv")
    assert "work.csv: 152 rows" in done.output
    rows = arrow_csv.read_csv(tmp_path / "out" / "work.csv").to_pylist()
    assert rows[0] == {
        "worker": "reward-0", "kind": "reward", "start_s": pytest.approx(BEGAN_S - 0.3, abs=1e-3), "duration_s": 0.25,
        "size": 50.0, "ok": True,
    }  # fmt: skip
    assert {row["worker"] for row in rows} == {"reward-0", "learner"}
    assert rows[-1] == {
        "worker": "learner", "kind": "update", "start_s": BEGAN_S + 56.5, "duration_s": 3.0, "size": 640.0, "ok": True
    }  # fmt: skip
    assert "no worker" in ran("fleet", "watch", "--from", tmp_path / "out" / "work.csv").output


def test_workers_whose_messages_stay_on_their_host_are_named_by_picture_and_tables(
    run_dir: Path, tmp_path: Path
) -> None:
    record(run_dir, MadeFleet())
    workers = {row.worker for row in MadeFleet().states(0)}
    away = sorted(workers - {"generator-0", "reward-0", "learner"})
    assert found("run", "trace", run_dir, "--perfetto", tmp_path / "a.json")["report"]["without_messages"] == away
    assert found("run", "export", run_dir, "--tables", tmp_path / "a")["report"]["without_messages"] == away
    for words in (
        ("run", "trace", run_dir, "--perfetto", tmp_path / "b.json"),
        ("run", "export", run_dir, "--tables", tmp_path / "b"),
    ):
        said = ran(*words).output
        assert f"no messages are recorded for {', '.join(away)}: joined hosts keep theirs" in said


def test_damaged_files_are_skipped_and_counted_by_every_reader(run_dir: Path, tmp_path: Path) -> None:
    record(run_dir, broken())
    for kind in ("metrics", "states", "messages"):
        first = sorted((run_dir / "observed").glob(f"{kind}-*.parquet"))[0]
        first.write_bytes(first.read_bytes()[:-20])
    assert "1 of 4 recorded files are damaged" in ran("fleet", "watch", run_dir).output
    assert "1 of 8 recorded files are damaged" in ran("run", "trace", run_dir).output
    assert "2 damaged files or lines" in ran("run", "trace", run_dir, "--perfetto", tmp_path / "out.json").output
    exported = found("run", "export", run_dir, "--tables", tmp_path / "out")["report"]
    assert exported["num_skipped"] == 3
    assert exported["rows"]["metrics"] == (UNTIL_S - PIECE_S) * 8 * len(LEVELS)
    folder = ran("fleet", "watch", "--from", run_dir / "observed").output
    assert "left out" in folder and "9 more" in folder
    assert "left out" in ran("run", "trace", "--from", run_dir / "observed").output


def test_an_open_incident_that_is_newer_than_the_recorded_metrics_is_a_finding(run_dir: Path) -> None:
    record(run_dir, MadeFleet())
    old = IncidentRecord(
        number=1, step=IncidentStep.OPENED, at_s=BEGAN_S + 20, since_s=BEGAN_S, component="generator-1", kind="disk"
    )
    new = IncidentRecord(
        number=2, step=IncidentStep.OPENED, at_s=BEGAN_S + UNTIL_S + 60, since_s=BEGAN_S + UNTIL_S + 55, role="reward",
        component="reward-0", kind="hung", sentence="it stands", score=2.0,
    )  # fmt: skip
    file = incident_records(run_dir)
    file.append(old, new)
    last = found("fleet", "watch", run_dir)["findings"]
    assert names(last) == [("generator-3", "slow", "service_ratio"), ("reward-0", "hung", "")]
    assert last[-1]["sentence"] == "it stands" and last[-1]["score"] == 2.0
    file.append(IncidentRecord(number=2, step=IncidentStep.ENDED, at_s=BEGAN_S + 300, component="reward-0"))
    assert names(found("fleet", "watch", run_dir)["findings"]) == [("generator-3", "slow", "service_ratio")]


def test_a_run_without_records_and_an_unknown_run_are_told_what_exists(run_dir: Path) -> None:
    for words in (
        ("fleet", "watch", run_dir),
        ("run", "trace", run_dir),
        ("run", "export", run_dir, "--tables", run_dir / "out"),
    ):
        assert "the observer writes" in str(ran(*words, code=2).exception)
    assert "recorded nothing yet" in str(
        ran("run", "trace", run_dir, "--perfetto", run_dir / "out.json", code=2).exception
    )
    assert sorted(path.name for path in run_dir.iterdir()) == [RESOLVED_NAME]
    absent = run_dir.parent / "absent"
    for command in (("fleet", "watch"), ("run", "trace")):
        assert str(run_dir) in str(ran(*command, absent, code=2).exception)
    assert "t.12.3; or the folder of a run" in str(ran("run", "trace", "demo", code=2).exception)


def test_options_that_contradict_one_another_are_refused(run_dir: Path, tmp_path: Path) -> None:
    table = tmp_path / "x.csv"
    for words in (
        ("fleet", "watch", run_dir, "--from", table),
        ("run", "trace", run_dir, "--from", table), ("run", "trace", "t.1.2", "--from", table),
        ("run", "trace", "t.1.2", "--perfetto", table), ("run", "trace", run_dir, "--last", 3),
        ("run", "export", run_dir), ("run", "export", run_dir, "--out", table, "--tables", table),
        ("run", "export", run_dir, "--tables", table, "--version", 3),
        ("run", "export", run_dir, "--out", table, "--csv"),
    ):  # fmt: skip
        assert ran(*words, code=2).exit_code == 2, words
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    record(run_dir, MadeFleet())
    assert "exists" in str(ran("run", "export", run_dir, "--tables", tmp_path / "full", code=2).exception)
    assert "is a folder" in str(ran("run", "trace", run_dir, "--perfetto", tmp_path / "full", code=2).exception)


def test_a_picture_says_what_it_shows(run_dir: Path, tmp_path: Path) -> None:
    record(run_dir, MadeFleet())
    done = found("run", "trace", run_dir, "--perfetto", tmp_path / "out.json")
    assert done["report"]["num_messages"] == 3 * UNTIL_S and done["report"]["num_updates"] == 2
    short = found("run", "trace", run_dir, "--perfetto", tmp_path / "out.json", "--last", 0.5)
    assert 3 * 29 <= short["report"]["num_messages"] <= 3 * 32
