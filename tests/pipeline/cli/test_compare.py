"""Claims about ``headrace run compare``."""

from __future__ import annotations

import json
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from pipeline.cli import headrace
from protocol.errors import ConfigError
from tests.pipeline.cli.probe import run_command
from tests.pipeline.observability.test_comparison import made


def called(*words: object) -> Result:
    return CliRunner().invoke(headrace, ["run", "compare", *map(str, words)], standalone_mode=False)


def test_the_text_has_runs_side_by_side_and_the_verdict(tmp_path: Path) -> None:
    done = called(made(tmp_path / "a", {10: 0.8}), made(tmp_path / "b", {10: 0.82}, rate=1.0, seed=4))
    assert done.exception is None
    lines = done.output.splitlines()
    assert lines[0].split() == ["run", "a", "b"]
    assert "seed            0" in done.output
    assert "No significant difference between A and B" in done.output
    assert any(line.split() == ["learner.learning_rate", "0.0001", "1.0"] for line in lines)


def test_json_has_curves_and_differences(tmp_path: Path) -> None:
    done = called(made(tmp_path / "a", {0: 0.4, 10: 0.9}), made(tmp_path / "b", {10: 0.6}, rate=1.0), "--json")
    found = json.loads(done.output)
    assert [point["update"] for point in found["runs"][0]["curve"]] == [0, 10]
    assert found["differences"][0]["is_called"] is True


def test_runs_are_named_by_their_names_under_the_folder_of_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        made(tmp_path / "runs" / name, {1: 0.5})
    assert called("a", "runs/b", "--html", "page.html").exception is None
    assert (tmp_path / "page.html").is_file()


def test_an_unknown_run_is_answered_with_those_that_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("demo-a", "demo-b"):
        made(tmp_path / "runs" / name, {1: 0.5})
    for unknown in ("demo-c", "runs/demo-c"):
        with pytest.raises(ConfigError, match=r"is not a run; .*runs has the runs .*demo-a"):
            headrace.main(["run", "compare", "demo-a", unknown], standalone_mode=False)


def test_less_than_two_runs_or_one_twice_is_a_wrong_use(tmp_path: Path) -> None:
    run = made(tmp_path / "a", {1: 0.5})
    for words, message in (((run,), "at least two"), ((run, run), "given twice")):
        with pytest.raises(click.UsageError, match=message):
            headrace.main(["run", "compare", *map(str, words)], standalone_mode=False)


def test_a_page_that_cannot_be_written_is_an_error_that_names_it(tmp_path: Path) -> None:
    runs = [made(tmp_path / name, {1: 0.5}) for name in ("a", "b")]
    with pytest.raises(ConfigError, match="cannot be written"):
        headrace.main(
            ["run", "compare", *map(str, runs), "--html", str(tmp_path / "no" / "page.html")], standalone_mode=False
        )


def test_names_and_settings_of_a_run_do_not_steer_the_terminal(tmp_path: Path) -> None:
    one, other = made(tmp_path / "a", {1: 0.5}), made(tmp_path / "b\x1b[2J", {1: 0.5}, dir="\x1b]0;x\x07")
    output = called(one, other).output
    assert "\x1b" not in output and "\x07" not in output


def test_a_comparison_without_a_page_imports_nothing_heavy(tmp_path: Path) -> None:
    runs = [str(made(tmp_path / name, {1: 0.5})) for name in ("a", "b")]
    _, code, modules = run_command(["run", "compare", *runs])
    assert code == 0
    assert not {"torch", "redis", "zmq", "pydantic", "jinja2"} & set(modules)
