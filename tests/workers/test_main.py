"""Claims about the command that starts one worker."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.process.exit_codes import ExitCode
from workers.__main__ import work


@pytest.mark.parametrize("more", [[], ["--name", "learner-2"]])
def test_a_second_learner_is_refused_in_a_sentence(more: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        work(["learner", "--run", "runs/demo", *more])
    assert "a run has one learner, which its supervisor starts" in capsys.readouterr().err


def test_a_folder_that_is_no_run_is_told_in_a_sentence(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "workers", "generator", "--run", str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == ExitCode.CONFIG
    assert "is not a run" in ended.stderr
    assert list(tmp_path.iterdir()) == [], "and is left as it was"
