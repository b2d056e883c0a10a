"""Claims about ``headrace fleet stacks``: real processes whose loop waits or is held up, and py-spy as a
program in the path."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result

from pipeline.cli import headrace
from pipeline.config.load import write_resolved
from pipeline.process import records
from pipeline.process.records import Started
from pipeline.process.stacks import request
from pipeline.supervisor.run_folder import prepare_run_dir
from protocol.errors import ConfigError
from tests.pipeline.op_config import op_config
from tests.pipeline.process.stacks.test_dump import Workers

pytestmark = pytest.mark.timeout(90)


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[Workers]:
    config = op_config(tmp_path)
    run_dir = prepare_run_dir(config, resume=False)
    write_resolved(config, run_dir)
    started = Workers(run_dir)
    yield started
    started.end()


def shown(workers: Workers, *words: str) -> Result:
    words = ("fleet", "stacks", *words, "--run", str(workers.folder))
    return CliRunner().invoke(headrace, words, catch_exceptions=False)


def test_workers_that_stand_at_one_place_are_a_group_and_the_odd_one_is_marked(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request, "LOOK_EVERY_S", 0.05)
    for name, kind in (("generator-0", "waits"), ("generator-1", "spins"), ("generator-2", "waits")):
        workers.start(name, kind)
    result = shown(workers)
    assert result.exit_code == 0
    lines = result.output.splitlines()
    assert lines[0].startswith("generator: generator-0, generator-2: ") and "UNLIKE" not in lines[0]
    (odd,) = [line for line in lines if line.startswith("generator: generator-1: ")]
    assert odd.endswith("stands in main  UNLIKE the others")
    assert any("spin_for_ever" in line for line in lines)
    figures: dict[str, Any] = json.loads(shown(workers, "--looks", "2", "--json").output)
    assert [group["workers"] for group in figures["groups"]] == [["generator-0", "generator-2"], ["generator-1"]]
    assert figures["groups"][1]["is_unlike"] and {*figures["stacks"]} == {"generator-0", "generator-1", "generator-2"}


def test_of_a_named_worker_every_thread_and_task_is_shown_or_why_it_has_none(workers: Workers) -> None:
    workers.start("generator-0")
    result = shown(workers, "generator-0", "generator-7", "--looks", "1", "--all")
    assert result.exit_code == 0
    for words in ("generator-7: no process of this name was started here", "generator-0, task life:", "deep_wait"):
        assert words in result.output


def test_a_run_without_workers_here_is_refused_with_the_reason(workers: Workers) -> None:
    with pytest.raises(ConfigError, match="has no stacks: no worker was started here"):
        shown(workers, "--looks", "1")
    with pytest.raises(ConfigError, match="has no stacks: generator-0: no process of this name was started here"):
        shown(workers, "generator-0", "--looks", "1")


def py_spy(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Put a program of that name first in the path."""
    (folder / "bin").mkdir()
    program = folder / "bin" / "py-spy"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o700)
    monkeypatch.setenv("PATH", f"{folder / 'bin'}:/usr/bin:/bin")


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ('echo "stack of $*"', "stack of dump --native --pid {pid}"),
        ('echo "Permission denied" >&2; exit 1', "    Permission denied"),
        ("exec sleep 60", "    py-spy has not answered within 0.5 s: the process is frozen, or the machine is busy"),
    ],
)
def test_native_stacks_are_py_spys_or_the_reason_why_it_prints_none(
    workers: Workers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, words: str
) -> None:
    monkeypatch.setattr("pipeline.cli.logs._NATIVE_S", 0.5 if "sleep" in script else 20.0)
    py_spy(tmp_path, monkeypatch, script)
    workers.start("generator-0")
    identity = records.identify(workers.processes["generator-0"].pid)
    assert identity is not None
    # another process has its number by now
    records.write_started(workers.folder, "reward-0", Started(msgspec.structs.replace(identity, pid=1), "reward"))
    result = shown(workers, "--native")
    assert result.exit_code == 0
    pid = workers.processes["generator-0"].pid
    assert result.output.splitlines() == [
        "generator-0:",
        words.format(pid=pid),
        *([""] if "echo" in script and "exit" not in script else []),
        "reward-0: no process of it runs on this host",
    ]


def test_without_py_spy_native_stacks_are_refused_with_the_remedy(
    workers: Workers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="--native needs it: pip install py-spy"):
        shown(workers, "--native")
