from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

import pipeline.rewards
from pipeline.cli.score.command import score


def test_the_example_in_the_readme_runs_as_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (Path(pipeline.rewards.__file__).parent / "README.md").read_text(encoding="utf-8")
    module = re.search(r"```python\n(# (\S+)\n.*?)```", text, re.DOTALL)
    shell = re.search(r"\$ cat > (\S+) <<'END'\n(.*?)END\n\$ headrace score (.*?)\n", text, re.DOTALL)
    assert module is not None
    assert shell is not None
    (tmp_path / module[2]).write_text(module[1])
    (tmp_path / shell[1]).write_text(shell[2])
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(score, shlex.split(shell[3]), catch_exceptions=False)
    assert result.exit_code == 0
    assert "accuracy 33.3%" in result.output
    assert re.search(r"sum +2 +0 +50\.0%", result.output)
