"""What the README shows works as it stands: its reward, its run file, its Python."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from ops.demo import task
from ops.docs.site import ROOT
from pipeline.cli import headrace
from tests.integration.fleet import EMULATED


def example(mark: str) -> str:
    """Return the README's only code block that holds ``mark``."""
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    (found,) = [block for block in re.findall(r"^```\w+\n(.*?)^```", page, re.MULTILINE | re.DOTALL) if mark in block]
    return found


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder as a clone is after ``make demo``, with the README's files."""
    monkeypatch.chdir(tmp_path)
    for name in ("ops", "configs"):
        (tmp_path / name).symlink_to(ROOT / name)
    task.main(["--out", "runs/demo-data"])
    for name in ("my_rewards.py", "mine.toml"):
        (tmp_path / name).write_text(example(f"# {name}\n"), encoding="utf-8")
    return tmp_path


def test_the_readmes_run_file_passes_the_check_and_its_reward_judges(clone: Path) -> None:
    checked = CliRunner().invoke(headrace, ["config", "check", "mine.toml", "configs/fleets/demo.toml"])
    assert checked.exit_code == 0, checked.output
    (clone / "answers.jsonl").write_text('{"response": "2+3=5", "answer": "5"}\n{"response": "7", "answer": "8"}\n')
    scored = CliRunner().invoke(headrace, ["score", "answers.jsonl", "--config", "mine.toml"])
    assert "accuracy 50.0%" in scored.output


@pytest.mark.integration
def test_the_readmes_python_runs_its_run_file(clone: Path) -> None:
    entry = clone / "path" / "headrace"
    entry.parent.mkdir()
    entry.symlink_to(ROOT / "pipeline" / "cli" / "headrace")
    small = [
        *(setting for setting in EMULATED if not setting.startswith("data.")),
        "algorithm.groups_per_update=4",
        "algorithm.group_size=4",
    ]
    names = {
        "HEADRACE__" + key.upper().replace(".", "__"): value for key, _, value in (s.partition("=") for s in small)
    }
    done = subprocess.run(
        [sys.executable, "-c", example("headrace.Run.start")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(entry.parent), str(ROOT)]), **names},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert re.fullmatch(r"finished \[[\d., ]+\]\n", done.stdout), done.stdout + done.stderr
