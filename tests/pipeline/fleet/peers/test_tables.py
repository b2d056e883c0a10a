"""Claims about tables of a fleet: what they become, and that their form changes nothing."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from pipeline.cli import headrace, main
from pipeline.fleet.peers.tables import TableForm, expected_s, frames, interval_s, read_rows, table_kind
from tests.pipeline.fleet.peers.fleets import fleet

HEADER = "time_s,worker,role,metric,value"


def metric_lines(seconds: int = 260, *, num: int = 6, step_s: float = 2.0) -> list[str]:
    """Return rows of a fleet whose third worker is slow from 140 s on."""

    def change(time_s: float, values: np.ndarray) -> None:
        if time_s >= 140.0:
            values[2, 0] *= 2.0

    rows = fleet(num, seconds=seconds, step_s=step_s, levels={"step_ms": 30.0, "heat": 50.0}, change=change)
    return [
        f"{frame.time_s},{worker},{role},{metric},{frame.values[at, column]:.6g}"
        for frame in rows
        for at, (worker, role) in enumerate(zip(frame.workers, frame.roles, strict=True))
        for column, metric in enumerate(frame.metrics)
    ]


def table(path: Path, lines: list[str], header: str = HEADER) -> Path:
    """Write a CSV file."""
    path.write_text("\n".join([header, *lines]) + "\n", encoding="utf-8")
    return path


def watched(*arguments: object) -> list[dict[str, object]]:
    """Return the findings that the command prints as JSON."""
    result = CliRunner().invoke(headrace, ["fleet", "watch", *map(str, arguments), "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)["findings"]


def test_an_odd_worker_of_unknown_metrics_is_found_in_a_table(tmp_path: Path) -> None:
    found = watched("--from", table(tmp_path / "metrics.csv", metric_lines()))
    assert [(one["worker"], one["role"], one["kind"], one["metric"]) for one in found] == [
        ("generator-2", "generator", "odd", "step_ms")
    ]
    assert set(found[0]) == {"worker", "role", "since_s", "alarm_s", "kind", "metric", "score", "sentence"}
    assert 120.0 <= float(str(found[0]["since_s"])) <= 165.0


def test_the_order_of_rows_and_repeated_rows_change_nothing(tmp_path: Path) -> None:
    lines = metric_lines()
    shuffled = [*lines, *lines[100:700]]
    random.Random(5).shuffle(shuffled)
    plain = watched("--from", table(tmp_path / "plain.csv", lines))
    assert watched("--from", table(tmp_path / "shuffled.csv", shuffled)) == plain != []


def test_times_since_1970_and_other_names_give_the_same(tmp_path: Path) -> None:
    moved = [f"{float(line.split(',', 1)[0]) + 1.7e9},{line.split(',', 1)[1]}" for line in metric_lines()]
    found = watched("--from", table(tmp_path / "moved.csv", moved))
    assert [one["worker"] for one in found] == ["generator-2"]
    assert float(str(found[0]["alarm_s"])) > 1.7e9


def test_a_table_without_roles_has_one_for_each_kind_of_name(tmp_path: Path) -> None:
    lines = [f"{at},{name}-{one},cpu,1.5" for at in range(3) for name in ("gpu", "cpu") for one in range(4)]
    rows, read = read_rows([table(tmp_path / "t.csv", lines, "time_s,worker,metric,value")], TableForm.METRICS)
    assert dict(zip(rows.workers, rows.roles, strict=True))["gpu-2"] == "gpu-"
    assert read.absent == ("role", "phase")


def test_a_counter_keeps_its_small_steps_however_large_it_is(tmp_path: Path) -> None:
    lines = [f"{at},w,r,done,{2**40 + at}" for at in range(5)]
    rows, _ = read_rows([table(tmp_path / "t.csv", lines)], TableForm.METRICS)
    assert [frame.values.item() for frame in frames(rows)] == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_workers_are_in_the_frames_from_their_first_row_to_soon_after_their_last(tmp_path: Path) -> None:
    lines = [f"{at},{name},r,cpu,1" for at in range(20) for name in "abc" if not (name == "b" and at < 5)]
    lines = [line for line in lines if not (",c," in line and int(line.split(",", 1)[0]) > 9)]
    rows, _ = read_rows([table(tmp_path / "t.csv", lines)], TableForm.METRICS)
    there = [frame.workers for frame in frames(rows)]
    assert there[4] == ("a", "c")
    assert there[5] == ("a", "b", "c")
    assert there[12] == ("a", "b", "c")
    assert there[13] == ("a", "b")


def test_a_missing_loss_is_no_sample_and_one_that_is_nan_is_not_finite(tmp_path: Path) -> None:
    lines = [f"{at},learner,learner,loss,{'nan' if at == 5 else 0.5}" for at in range(8)]
    found = watched("--from", table(tmp_path / "t.csv", lines))
    assert [(one["kind"], one["alarm_s"]) for one in found] == [("numeric", 5.0)]


def test_the_interval_is_the_usual_time_between_samples(tmp_path: Path) -> None:
    lines = [f"{at * 5 + offset},w{offset},r,cpu,1" for at in range(20) for offset in (0, 1)]
    rows, _ = read_rows([table(tmp_path / "t.csv", lines)], TableForm.METRICS)
    assert interval_s(rows) == 5.0


def work_lines(num: int = 8, seconds: float = 600.0, *, slow: int = -1, failing: int = -1) -> list[str]:
    """Return pieces of work of very different sizes; a worker is slow or fails from 250 s on."""
    draw = np.random.default_rng(3)
    lines = list[str]()
    for worker in range(num):
        at = float(draw.uniform(0, 3))
        while at < seconds:
            size = int(draw.lognormal(5, 1))
            duration = (0.3 + size / 150) * float(np.exp(draw.normal(0, 0.15)))
            is_odd = at > 250.0
            duration *= 2.0 if is_odd and worker == slow else 1.0
            ok = not (is_odd and worker == failing and draw.random() < 0.7)
            lines.append(f"w{worker},score,{at:.3f},{duration:.4f},{size},{str(ok).lower()}")
            at += duration + 0.2
    return lines


WORK = "worker,kind,start_s,duration_s,size,ok"


def test_a_slow_worker_is_found_in_finished_work_of_many_sizes(tmp_path: Path) -> None:
    found = watched("--from", table(tmp_path / "work.csv", work_lines(slow=4), WORK))
    assert [(one["worker"], one["role"], one["kind"]) for one in found] == [("w4", "score", "slow")]
    assert float(str(found[0]["alarm_s"])) <= 400.0


def test_a_failing_worker_is_found_in_finished_work(tmp_path: Path) -> None:
    found = watched("--from", table(tmp_path / "work.csv", work_lines(failing=2), WORK))
    assert ("w2", "errors") in [(one["worker"], one["kind"]) for one in found]
    assert {one["worker"] for one in found} == {"w2"}


def test_healthy_work_of_many_sizes_blames_no_worker(tmp_path: Path) -> None:
    assert watched("--from", table(tmp_path / "work.csv", work_lines(), WORK)) == []


def test_what_a_size_lets_expect_is_a_median_and_goes_on_in_proportion() -> None:
    size = np.concatenate([np.linspace(10, 100, 100), [1000.0, np.nan]])
    duration = np.concatenate([np.linspace(10, 100, 100) / 5, [999.0, 3.0]])
    expected = expected_s(size, duration)
    assert np.allclose(expected[10:90], duration[10:90], rtol=0.05)
    assert expected[100] > 50.0
    assert expected[101] == pytest.approx(np.median(duration))


def test_a_folder_may_have_other_tables_which_are_named(tmp_path: Path) -> None:
    table(tmp_path / "metrics.csv", metric_lines(60))
    other = table(tmp_path / "states.csv", ["0,w,idle"], "time_s,worker,waiting_for")
    assert table_kind(other) is None
    result = CliRunner().invoke(headrace, ["fleet", "watch", "--from", str(tmp_path)])
    assert result.exit_code == 0
    assert "states.csv: left out" in result.stderr
    assert "no worker of 6 is odd" in result.stdout


def test_a_table_in_pieces_is_one_table_and_a_damaged_piece_is_left_out(tmp_path: Path) -> None:
    lines = metric_lines()
    whole = watched("--from", table(tmp_path / "whole.csv", lines))
    pieces = tmp_path / "pieces"
    pieces.mkdir()
    for at in range(5):
        table(pieces / f"metrics-{at}.csv", lines[at * len(lines) // 5 : (at + 1) * len(lines) // 5])
    (pieces / "metrics-9.parquet").write_bytes(b"PAR1 and no more")
    assert watched("--from", pieces) == whole != []
    result = CliRunner().invoke(headrace, ["fleet", "watch", "--from", str(pieces)])
    assert "left out:" in result.stderr
    assert "metrics-9.parquet" in result.stderr
    assert CliRunner().invoke(headrace, ["fleet", "watch", "--from", str(pieces / "metrics-9.parquet")]).exit_code != 0


def test_finished_work_in_pieces_has_the_workers_of_all(tmp_path: Path) -> None:
    lines = [f"w-{number % 7},score,{number},1.0,5,true" for number in range(70)]
    first, second = table(tmp_path / "a.csv", lines[:33], WORK), table(tmp_path / "b.csv", lines[33:], WORK)
    whole, _ = read_rows([table(tmp_path / "all.csv", lines, WORK)], TableForm.WORK)
    rows, _ = read_rows([first, second], TableForm.WORK)
    assert rows.workers == whole.workers
    assert sorted(zip(rows.time_s, rows.worker, rows.value, strict=True)) == sorted(
        zip(whole.time_s, whole.worker, whole.value, strict=True)
    )


@pytest.mark.parametrize(
    ("header", "line", "words"),
    [
        ("time_s,worker,metric", "0,w,cpu", "expected the columns time_s, worker, metric, value"),
        (HEADER, "0,w,r,cpu,fast", "row 2"),
        (HEADER, "soon,w,r,cpu,1", "row 2"),
        (WORK, "w,score,0,-3,1,true", "durations below 0"),
    ],
)
def test_a_bad_table_gets_a_sentence(tmp_path: Path, header: str, line: str, words: str, capsys) -> None:
    with pytest.raises(SystemExit) as ending:
        main(["fleet", "watch", "--from", str(table(tmp_path / "bad.csv", [line], header))])
    assert ending.value.code == 2
    error = capsys.readouterr().err
    assert words in error
    assert "Traceback" not in error


def test_ignored_and_absent_columns_are_named(tmp_path: Path) -> None:
    path = table(tmp_path / "t.csv", ["0,w,cpu,1,z"], "time_s,worker,metric,value,zone")
    result = CliRunner().invoke(headrace, ["fleet", "watch", "--from", str(path)])
    assert "the columns zone are ignored" in result.stderr
    assert "without role" in result.stderr


def test_a_worker_whose_pieces_cease_while_its_peers_go_on_is_silent(tmp_path: Path) -> None:
    def after(line: str, since_s: float) -> bool:
        return float(line.split(",")[2]) > since_s

    killed = [line for line in work_lines(5) if not (line.startswith("w3,") and after(line, 300.0))]
    found = watched("--from", table(tmp_path / "work.csv", killed, WORK))
    assert [(one["worker"], one["kind"]) for one in found] == [("w3", "silent")]
    assert 290.0 <= float(str(found[0]["since_s"])) <= 310.0
    ended = [line for line in work_lines(5) if not after(line, 300.0)]
    assert watched("--from", table(tmp_path / "ended.csv", ended, WORK)) == []


def test_a_worker_at_a_piece_of_work_is_not_idle_and_the_longest_piece_is_known(tmp_path: Path) -> None:
    lines = ["a,score,0,2,1,true", "a,score,3,4,1,true", *(f"b,score,{at},1,1,true" for at in range(12))]
    rows, _ = read_rows([table(tmp_path / "work.csv", lines, WORK)], TableForm.WORK)
    seen = {frame.time_s: dict(zip(frame.metrics, frame.values[0].tolist(), strict=True)) for frame in frames(rows)}
    assert [one["finished_age_s"] for at, one in seen.items() if 2.0 <= at < 7.0] == [0.0, 0.0, 0.0, 0.0, 0.0]
    assert seen[9.0]["finished_age_s"] == 2.0
    assert {one["longest_piece_s"] for one in seen.values()} == {4.0}
