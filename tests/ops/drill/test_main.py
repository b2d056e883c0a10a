"""Claims about ``python -m ops.drill``: many drills in a row."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ops.drill import __main__ as fault_drill
from ops.drill.fleet import ROOT
from ops.drill.one import Outcome
from ops.drill.schedule import Plan


def test_a_drill_that_breaks_is_told_as_a_violation_and_the_others_are_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def drilled(schedule: Plan, folder: Path, **_: object) -> Outcome:
        folder.rmdir()
        if schedule.seed == 1:
            raise RuntimeError("no such host")
        return Outcome(schedule.seed, schedule.algorithm, ())

    monkeypatch.setattr(fault_drill, "drill", drilled)
    monkeypatch.chdir(ROOT)
    assert fault_drill.main(["--seed", "0", "--runs", "3", "--json", str(tmp_path / "drills.jsonl")]) == 1
    rows = [json.loads(row) for row in (tmp_path / "drills.jsonl").read_text().splitlines()]
    assert [(row["seed"], len(row["violations"])) for row in rows] == [(0, 0), (1, 1), (2, 0)]
    assert "RuntimeError: no such host" in capsys.readouterr().out
