"""The examples of the verifiers' guide run as written."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import pipeline.rewards
from pipeline.cli.score.command import score
from tests.pipeline.rewards.served import Reply, judgement, served


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run_example(folder: Path, text: str) -> Result:
    """Write the files that ``text`` shows, and run its only ``headrace score``."""
    for name, content in re.findall(r"```(?:python|toml)\n# (\S+)\n(.*?)```", text, re.DOTALL):
        (folder / name).write_text(content)
    for name, content in re.findall(r"\$ cat > (\S+) <<'END'\n(.*?)END\n", text, re.DOTALL):
        (folder / name).write_text(content)
    (command,) = re.findall(r"\$ headrace score (.*)", text)
    return CliRunner().invoke(score, shlex.split(command), catch_exceptions=False)


def section(heading: str) -> str:
    text = (Path(pipeline.rewards.__file__).parent / "README.md").read_text(encoding="utf-8")
    found = re.search(rf"^## {heading}\n(.*?)(?=^## )", text, re.DOTALL | re.MULTILINE)
    assert found is not None
    return found[1]


def test_the_example_in_the_readme_runs_as_written(folder: Path) -> None:
    text = (Path(pipeline.rewards.__file__).parent / "README.md").read_text(encoding="utf-8")
    first = text.partition("\n## ")[0]
    result = run_example(folder, first + section("Check it before training"))
    assert result.exit_code == 0
    assert "accuracy 33.3%" in result.output
    assert re.search(r"sum +2 +0 +50\.0%", result.output)


def test_the_example_of_several_rewards_runs_as_written(folder: Path) -> None:
    result = run_example(folder, section("Several rewards"))
    assert result.exit_code == 0, result.output
    assert "accuracy 50.0%" in result.output
    assert re.search(r"shortness +-0\.4 *\n", result.output)
    assert re.search(r"work +\+0\.25 *\n", result.output)


def test_the_example_of_a_relative_judge_runs_as_written(folder: Path) -> None:
    result = run_example(folder, section("Whole groups"))
    assert result.exit_code == 0, result.output
    assert "accuracy 75.0%" in result.output
    assert re.search(r"shortest +\+0\.5 *\n", result.output)


def test_the_example_of_programs_runs_as_written(folder: Path) -> None:
    result = run_example(folder, section("Use it"))
    assert result.exit_code == 0, result.output
    assert "accuracy 50.0%" in result.output


def test_the_example_of_judgments_runs_as_written(folder: Path) -> None:
    result = run_example(folder, section("What is wrong with a response"))
    assert result.exit_code == 0, result.output
    assert "accuracy 25.0%" in result.output
    assert "wrong.jsonl:1: step 3 says 4, should be 3" in result.output
    assert "wrong.jsonl:2: step 1 says 3 * 4 = 13, should be 12" in result.output
    assert re.search(r"no judgment: nothing_found +1 ", result.output)


def test_the_example_of_a_judge_runs_as_written(folder: Path) -> None:
    def by_text(body: dict[str, Any], number: int) -> Reply:
        is_good = "It scatters." in body["messages"][0]["content"]
        return 200, judgement(f"Short.\nScore: {9 if is_good else 2}")

    with served(by_text) as server:
        result = run_example(folder, section("A judge behind HTTP").replace("http://127.0.0.1:8000", server.url))
    assert result.exit_code == 0, result.output
    assert "accuracy 55.0%" in result.output
