"""Claims about calls of a place's programs: each ends, and leaves nothing behind."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from pipeline.process.records import process_runs
from pipeline.supervisor.launchers.commands import ask, call
from pipeline.supervisor.launchers.seam import LaunchFailed
from tests.pipeline.supervisor.launchers.contract import until


def program(folder: Path, script: str) -> str:
    path = folder / "kubectl"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def test_a_program_that_hangs_is_ended_at_its_deadline_with_all_that_it_started(tmp_path: Path) -> None:
    hanging = program(tmp_path, f"sleep 60 & echo $! > {tmp_path}/child; wait; echo too late")
    with pytest.raises(LaunchFailed, match=r"gave no answer within 2 s \(launch\.answer_s\)"):
        ask([hanging], timeout_s=2.0)
    child = int((tmp_path / "child").read_text())
    until(lambda: not process_runs(child))


def test_an_answer_does_not_wait_for_what_a_program_left_in_the_background(tmp_path: Path) -> None:
    leaving = program(tmp_path, f"sleep 60 & echo $! > {tmp_path}/child; cat; echo a warning >&2")
    began = time.monotonic()
    answer = ask([leaving], timeout_s=30.0, text="a request")
    assert (answer.code, answer.output, answer.error) == (0, "a request", "a warning\n")
    assert time.monotonic() - began < 30.0
    child = int((tmp_path / "child").read_text())
    assert process_runs(child), "as a connection that later calls share"
    call(["kill", str(child)], timeout_s=30.0)


def test_a_failure_is_told_in_the_programs_words_on_one_line(tmp_path: Path) -> None:
    failing = program(tmp_path, "echo 'no such\n\033[31mcluster' >&2; exit 3")
    with pytest.raises(LaunchFailed, match=r"kubectl failed with code 3: no such \S*cluster$") as told:
        call([failing], timeout_s=30.0)
    assert "\033" not in str(told.value)
    with pytest.raises(LaunchFailed, match="does not start"):
        call([str(tmp_path / "absent")], timeout_s=30.0)
