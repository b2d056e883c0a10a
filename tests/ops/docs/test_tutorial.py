"""The tutorial's commands work as the page gives them, and the model learns."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ops.docs.site import ROOT

PAGE = ROOT / "ops/docs/tutorial.md"
NEEDS_A_FLEET = "headrace up "


def blocks() -> list[str]:
    """Return the page's shell blocks, as they stand."""
    return re.findall(r"^```sh\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def run(script: str, folder: Path, timeout_s: float) -> str:
    """Run a script in a folder as a person would who has activated this environment."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script], cwd=folder, env=os.environ | {"PATH": path, "COLUMNS": "100"},
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout_s,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_tutorials_commands_before_the_run_work_as_they_stand(tmp_path: Path) -> None:
    before = blocks()[: next(at for at, block in enumerate(blocks()) if block.startswith(NEEDS_A_FLEET))]
    script = "".join(before)
    # an untrained model will do where nothing is sampled, and takes no time to make
    assert "range(401)" in script
    shown = run(script.replace("range(401)", "range(1)"), tmp_path, 110.0)
    assert "accuracy 33.3%" in shown
    assert "training: 7882 prompts of 7882 lines" in shown
    assert "algorithm.clip_high" in shown


@pytest.mark.long
@pytest.mark.timeout(400)
def test_the_tutorial_trains_what_it_says_from_first_to_last_command(tmp_path: Path) -> None:
    shown = run("".join(blocks()), tmp_path, 380.0)
    before, after = map(float, re.findall(r"held-out accuracy: ([\d.]+) % before, ([\d.]+) % after", shown)[0])
    assert before < 50 < 80 < after, shown
    assert "it balances" in shown
    # which of the three are right differs by run, since workers run side by side
    asked = re.findall(r"(\d+),(\d+)>(\d+)", shown.replace(" ", "").rpartition("model:")[2])
    assert len(asked) == 3, shown
    assert any(max(first, second) == answer for first, second, answer in asked), shown
    assert (tmp_path / "runs/first/report.html").is_file()
