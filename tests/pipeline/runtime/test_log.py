"""One log a worker."""

from __future__ import annotations

import io
import json
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import structlog

from pipeline.runtime.log import WorkerLog, log_to_stderr, open_log


@pytest.fixture
def log(tmp_path: Path) -> Iterator[WorkerLog]:
    opened = open_log(tmp_path, role="reward", worker="reward-0", run="demo", terminal=io.StringIO())
    yield opened
    opened.close()
    opened.close()


def lines(log: WorkerLog) -> list[dict[str, object]]:
    log.flush()
    return [json.loads(line) for line in log.path.read_text().splitlines()]


def test_every_line_says_who_wrote_it_under_which_version(log: WorkerLog):
    log.logger.info("scored", num=3, accuracy=np.float32(0.5))
    log.context["policy_version"] = 7
    logging.getLogger("some.library").warning("careful with %s", "that")
    structlog.get_logger("module").info("later")
    first, second, third = lines(log)
    assert first["event"] == "scored"
    assert first["num"] == 3
    assert "0.5" in str(first["accuracy"])
    assert (first["level"], first["policy_version"]) == ("info", -1)
    assert (second["event"], second["logger"], second["level"]) == ("careful with that", "some.library", "warning")
    assert (second["policy_version"], third["policy_version"]) == (7, 7)
    for line in (first, second, third):
        assert (line["role"], line["worker"], line["run"]) == ("reward", "reward-0", "demo")
        assert str(line["at"]).endswith("Z")


def test_warnings_are_lines_too(tmp_path: Path):
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        log = open_log(tmp_path, role="reward", worker="r", run="demo", terminal=None)
        warnings.warn("deprecated thing", stacklevel=1)
        (line,) = lines(log)
        log.close()
    assert "deprecated thing" in str(line["event"])
    assert (line["logger"], line["level"]) == ("py.warnings", "warning")


def test_an_exception_brings_its_traceback(log: WorkerLog):
    try:
        _ = 1 / 0
    except ZeroDivisionError:
        log.logger.exception("failed")
    (line,) = lines(log)
    assert "Traceback" in str(line["exception"])
    assert "ZeroDivisionError: division by zero" in str(line["exception"])


def test_text_that_is_not_utf8_is_escaped_not_fatal(log: WorkerLog):
    log.logger.info("odd", text="\udcff", raw=b"\xff")
    assert lines(log)[0]["event"] == "odd"


def test_off_a_terminal_only_warnings_and_errors_are_shown(tmp_path: Path):
    shown = io.StringIO()
    log = open_log(tmp_path, role="reward", worker="reward-0", run="demo", terminal=shown)
    log.logger.info("quiet")
    log.logger.error("loud", why="because")
    log.close()
    assert "quiet" not in shown.getvalue()
    assert "loud" in shown.getvalue()
    assert "because" in shown.getvalue()


def test_the_log_is_bounded(tmp_path: Path):
    log = open_log(
        tmp_path, role="reward", worker="r", run="demo", terminal=None, max_file_bytes=2_000, num_old_files=2
    )
    for number in range(200):
        log.logger.info("line", number=number)
    log.close()
    files = sorted(log.path.parent.iterdir())
    assert [file.name for file in files] == ["r.jsonl", "r.jsonl.1", "r.jsonl.2"]
    assert sum(file.stat().st_size for file in files) <= 3 * 2_000
    assert json.loads(log.path.read_text().splitlines()[-1])["number"] == 199


def test_closing_leaves_logging_as_it_was(tmp_path: Path):
    before = logging.getLogger().handlers[:]
    open_log(tmp_path, role="reward", worker="r", run="demo", terminal=None).close()
    assert logging.getLogger().handlers == before


def test_what_a_command_logs_goes_to_standard_error_and_cannot_act_on_the_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    log_to_stderr()
    try:
        structlog.get_logger("any").info("chatter")
        structlog.get_logger("any").warning("left_behind", worker="reward\x1b[2J-0")
    finally:
        structlog.reset_defaults()
    said = capsys.readouterr()
    assert said.out == "", "standard output is for the command's answer alone"
    assert "left_behind" in said.err
    assert "chatter" not in said.err, "no terminal is there to read it"
    assert "\x1b" not in said.err


def test_a_log_that_is_closed_leaves_a_command_its_standard_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log_to_stderr()
    try:
        open_log(tmp_path, role="supervisor", worker="supervisor", run="r", terminal=None).close()
        structlog.get_logger("any").warning("later")
    finally:
        structlog.reset_defaults()
    said = capsys.readouterr()
    assert said.out == ""
    assert "later" in said.err
