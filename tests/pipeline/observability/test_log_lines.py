"""Claims about a run's logs as `headrace run logs` shows them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from pipeline.cli import headrace
from pipeline.files import cut
from pipeline.observability import log_lines
from pipeline.observability.log_lines import LogReader, parse
from pipeline.runtime.log import open_log
from protocol.ids import Role


def line(worker: str, second: int, event: str = "update", level: str = "info", **fields: object) -> str:
    at = f"2026-01-31T12:00:{second:02d}.000001Z"
    return json.dumps({**fields, "event": event, "level": level, "at": at, "worker": worker, "role": "learner"}) + "\n"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "runs" / "demo"
    (folder / "logs").mkdir(parents=True)
    (folder / "config.toml").touch()
    return folder


def write(run: Path, worker: str, *lines: str) -> None:
    with (run / "logs" / f"{worker}.jsonl").open("a") as file:
        file.write("".join(lines))


def shown(*words: str) -> list[str]:
    done = CliRunner().invoke(headrace, ["run", "logs", *words], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output.splitlines()


def test_lines_of_all_workers_are_shown_in_the_order_of_time(run: Path) -> None:
    write(run, "learner", line("learner", 1, update=7), line("learner", 3))
    write(run, "reward-0", line("reward-0", 2, "scored", num=3))
    assert shown(str(run)) == [
        "12:00:01 learner      info    update  update=7",
        "12:00:02 reward-0     info    scored  num=3",
        "12:00:03 learner      info    update",
    ]
    assert [text[9:17] for text in shown(str(run), "--last", "2")] == ["reward-0", "learner "]
    assert [json.loads(text)["at"][17:19] for text in shown(str(run), "learner", "--json")] == ["01", "03"]


def test_what_the_log_of_a_worker_writes_is_read(run: Path) -> None:
    log = open_log(run, role=Role.LEARNER, worker="learner", run="demo")
    try:
        log.logger.warning("odd", reason="text with \x1b[31m colour")
        try:
            raise ValueError("a cause")
        except ValueError:
            log.logger.exception("worker_failed")
    finally:
        log.close()
    lines = shown(str(run), "--level", "warning")
    assert "odd  reason=text with" in lines[0] and "\x1b" not in "".join(lines)
    assert "worker_failed" in lines[1] and lines[-1] == "    ValueError: a cause"


def test_only_the_wanted_levels_are_shown(run: Path) -> None:
    write(run, "learner", *(line("learner", n, level=level) for n, level in enumerate(("info", "warning", "error"))))
    assert [text.split()[2] for text in shown(str(run), "--level", "warning")] == ["warning", "error"]


def test_a_worker_without_a_log_is_refused_with_those_that_have_one(run: Path) -> None:
    write(run, "learner", line("learner", 1))
    done = CliRunner().invoke(headrace, ["run", "logs", "lerner", str(run)])
    assert "no log of lerner; it has those of: learner" in str(done.exception)


def test_new_lines_come_once_over_torn_ends_and_a_file_that_was_renamed_at_its_limit(run: Path) -> None:
    reader = LogReader(run)
    whole = line("learner", 2)
    write(run, "learner", line("learner", 1), whole[:20])
    assert [found.at[17:19] for found in reader.new()] == ["01"]
    write(run, "learner", whole[20:])
    assert [found.at[17:19] for found in reader.new()] == ["02"]
    path = run / "logs" / "learner.jsonl"
    path.rename(run / "logs" / "learner.jsonl.1")
    write(run, "learner", line("learner", 3), line("learner", 4), line("learner", 5))
    assert [found.at[17:19] for found in reader.new()] == ["03", "04", "05"]
    assert reader.new() == []


def seconds(lines: list[log_lines.LogLine]) -> list[str]:
    return [found.at[17:19] for found in lines]


def test_what_was_written_before_a_renaming_and_after_it_is_followed(run: Path) -> None:
    reader, path = LogReader(run), run / "logs" / "learner.jsonl"
    write(run, "learner", line("learner", 1))
    assert seconds(reader.new()) == ["01"]
    write(run, "learner", line("learner", 2))
    path.rename(path.with_name("learner.jsonl.1"))
    write(run, "learner", line("learner", 3))
    path.with_name("learner.jsonl.1").rename(path.with_name("learner.jsonl.2"))
    path.rename(path.with_name("learner.jsonl.1"))
    write(run, "learner", line("learner", 4))
    assert seconds(reader.new()) == ["02", "03", "04"]
    assert reader.new() == []


def test_a_file_that_was_cut_at_its_beginning_repeats_no_line(run: Path) -> None:
    reader, path = LogReader(run), run / "logs" / "learner.jsonl"
    write(run, "learner", *(line("learner", n) for n in range(10)))
    reader.new()
    write(run, "learner", line("learner", 10))
    assert cut(path, max_bytes=100, kept_bytes=3 * len(line("learner", 1)))
    assert seconds(reader.new()) == ["10"]
    write(run, "learner", line("learner", 11))
    assert seconds(reader.new()) == ["11"]


def test_a_flood_is_followed_piece_by_piece_and_no_line_is_lost(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_lines, "_PIECE_BYTES", 500)
    monkeypatch.setattr(log_lines, "_TAIL_BYTES", 2000)
    reader, found = LogReader(run), list[str]()
    reader.new()
    write(run, "learner", line("learner", 0))
    assert seconds(reader.new()) == ["00"] and not reader.is_behind
    long = line("learner", 20, reason="x" * 700)
    write(run, "learner", *(line("learner", n) for n in range(1, 20)), long, "y" * 5000 + "\n", line("learner", 21))
    for _ in range(30):
        lines = reader.new()
        assert sum(len(one.text) for one in lines) <= 2000
        found += seconds(lines)
        if not reader.is_behind:
            break
    assert found == [f"{n:02d}" for n in range(1, 22)]


def test_of_many_logs_only_the_last_lines_are_kept(run: Path) -> None:
    for number in range(5):
        write(run, f"reward-{number}", *(line(f"reward-{number}", 10 * n + number) for n in range(5)))
    assert seconds(LogReader(run).new(3)) == ["42", "43", "44"]
    assert LogReader(run).new(3)[0].worker == "reward-2"


def test_lines_of_another_host_act_on_no_terminal_in_either_form(run: Path) -> None:
    hostile = line("reward-0", 1).replace("update", "odd\x9b31m\u2028\u202e")
    write(run, "reward-0", hostile, line("reward-0", 2).replace("update", "\\ud800"))
    for words in ((), ("--json",)):
        text = "\n".join(shown(str(run), *words))
        assert not set(text) & set("\x1b\x9b\u2028\u202e\ud800")
    assert json.loads(shown(str(run), "--json")[0])["event"] == "odd\x9b31m\u2028\u202e"


def test_of_a_long_log_only_the_end_is_read(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_lines, "_TAIL_BYTES", 300)
    write(run, "learner", *(line("learner", n) for n in range(20)))
    assert [found.at[17:19] for found in LogReader(run).new()] == ["18", "19"]


@pytest.mark.parametrize("text", ["", "no JSON", "[]", "3", '{"at": "x"}', '{"at"'])
def test_a_line_that_is_none_is_passed_over(text: str) -> None:
    assert parse(text) is None


def test_lines_that_come_are_followed_until_an_interrupt(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(run, "learner", line("learner", 1))
    turns = iter(range(2))

    def sleep(_: float) -> None:
        if next(turns, None) is None:
            raise KeyboardInterrupt
        write(run, "learner", line("learner", 2))

    monkeypatch.setattr("pipeline.cli.logs.time.sleep", sleep)
    done = CliRunner().invoke(headrace, ["run", "logs", str(run), "--follow"])
    assert [text[:8] for text in done.output.splitlines() if ":" in text] == ["12:00:01", "12:00:02", "12:00:02"]
    assert done.exit_code == 1
