"""Claims about ``headrace doctor``: plain lines and JSON, and exit codes that scripts go by."""

from __future__ import annotations

import json
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from pipeline.cli import headrace
from pipeline.cli.doctor import render
from pipeline.preflight import doctor, host
from pipeline.preflight.findings import CheckFinding, fine, refuse, warn
from tests.pipeline.cli.probe import run_command
from tests.pipeline.op_config import write_config

FOUND = {
    "machine": [fine("python", "3.11.7"), warn("open files", "64 open files", "at least 148", "`ulimit -n 148`")],
    "configuration": [refuse("ports", "0 of 5600 are free\x1b[2J", "4 for this fleet", "widen wire.ports " * 9)],
}


def test_a_pipe_gets_a_line_a_finding() -> None:
    lines = [click.unstyle(line) for line in render(FOUND, None)]
    assert lines[:2] == [
        "ok: python: 3.11.7",
        "warning: open files: 64 open files; expected at least 148; `ulimit -n 148`",
    ]
    assert lines[-1] == "1 error, 1 warning"
    assert len(lines) == 4
    assert "\x1b" not in render(FOUND, None)[2]
    assert not any("\x1b[2J" in line for line in render(FOUND, 80))


def test_a_terminal_gets_what_was_expected_and_what_to_do_on_lines_of_their_own() -> None:
    lines = [click.unstyle(line) for line in render(FOUND, 80)]
    assert max(map(len, lines)) <= 80
    assert lines[2:5] == [
        "warning  open files      64 open files",
        " " * 25 + "expected: at least 148",
        " " * 25 + "→ `ulimit -n 148`",
    ]
    assert "all is well" in click.unstyle(render({"machine": [fine("python", "3")]}, 80)[-1])


def test_an_error_of_machine_or_configuration_is_exit_code_2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "probe_torch", lambda: host.TorchBuild(version="2", cuda=None, threads=1))
    path = str(write_config(tmp_path))
    done = CliRunner().invoke(headrace, ["doctor", path, "--json"], standalone_mode=False)
    found = json.loads(done.stdout)
    assert (done.return_value, found["ok"], found["level"]) == (0, True, "warning")
    assert {"check", "level", "found", "expected", "do"} == set(found["machine"][0])
    assert "types" in [one["check"] for one in found["configuration"]]
    done = CliRunner().invoke(
        headrace, ["doctor", path, "--set", "data.train=['/no/such.jsonl']", "--json"], standalone_mode=False
    )
    found = json.loads(done.stdout)
    assert (done.return_value, found["ok"]) == (2, False)
    assert [one["check"] for one in found["configuration"] if one["level"] == "error"] == ["data"]


def test_the_machine_is_examined_though_no_configuration_can_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "probe_torch", lambda: host.TorchBuild(version="2", cuda=None, threads=1))
    broken = tmp_path / "run.toml"
    broken.write_text("[model\n")
    done = CliRunner().invoke(headrace, ["doctor", str(broken), "--json"], standalone_mode=False)
    found = json.loads(done.stdout)
    assert done.return_value == 2 and len(found["machine"]) > 3
    (only,) = found["configuration"]
    assert (only["check"], only["level"]) == ("settings", "error") and str(broken) in only["found"]


def test_a_machine_without_torch_is_an_error_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "probe_torch", lambda: "ImportError: no torch")
    done = CliRunner().invoke(headrace, ["doctor"], standalone_mode=False)
    assert done.return_value == 2
    assert "error: torch: cannot be used: ImportError: no torch" in done.stdout


def test_doctor_does_not_import_torch_and_asks_it_elsewhere(tmp_path: Path) -> None:
    printed, code, modules = run_command(["doctor", str(write_config(tmp_path)), "--json"])
    assert (code, json.loads(printed)["ok"]) == (0, True)
    assert {"torch", "vllm", "transformers"}.isdisjoint(modules)
    assert any("for CPUs" in one["found"] or "CUDA" in one["found"] for one in json.loads(printed)["machine"])


def test_ports_and_metrics_are_looked_at_where_a_run_names_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "probe_torch", lambda: "not asked here")
    given: list[str] = ["wire.transport=tcp", "wire.ports=1-3", "supervisor.metrics_port=9"]
    monkeypatch.setattr(doctor, "free_ports", lambda _, ports, enough: 0 if list(ports) == [1, 2, 3] else enough)
    options = [word for one in given for word in ("--set", one)]
    done = CliRunner().invoke(headrace, ["doctor", str(write_config(tmp_path)), *options], standalone_mode=False)
    assert "error: ports: 0 of 1-3 are free on 127.0.0.1" in done.stdout
    assert "ok: metrics: port 9 is free" in done.stdout


def test_findings_have_one_line_of_words() -> None:
    assert CheckFinding("a", FOUND["machine"][1].level, "b").words == "b"
