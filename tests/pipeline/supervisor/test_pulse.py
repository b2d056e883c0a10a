"""Claims about the pulse of a supervisor, by which probes of a container judge it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from pipeline.cli import headrace
from pipeline.fleet.status import RunSnapshot
from pipeline.supervisor.pulse import NAME, Pulse, trouble
from tests.pipeline.supervisor.supervised import Run


def test_a_loop_that_stands_still_is_not_live(tmp_path: Path) -> None:
    pulse = Pulse(tmp_path)
    assert "no supervisor was started" in trouble(tmp_path, needs_ready=False)
    pulse.beat(0.0, is_ready=False)
    begun_s = (tmp_path / NAME).stat().st_mtime
    assert trouble(tmp_path, needs_ready=False, at_s=begun_s + 59.0) == ""
    assert "has not responded for 61 s" in trouble(tmp_path, needs_ready=False, at_s=begun_s + 61.0)
    os.utime(tmp_path / NAME, (0, 0))
    pulse.beat(1.0, is_ready=False)
    assert (tmp_path / NAME).stat().st_mtime == 0, "at most every two seconds"
    pulse.beat(3.0, is_ready=False)
    assert trouble(tmp_path, needs_ready=False) == ""


def test_only_a_worker_at_work_makes_it_ready_and_an_ended_one_stays_live(tmp_path: Path) -> None:
    pulse = Pulse(tmp_path)
    pulse.beat(0.0, is_ready=False)
    assert "no worker" in trouble(tmp_path, needs_ready=True)
    pulse.beat(0.1, is_ready=True)
    assert trouble(tmp_path, needs_ready=True) == ""
    pulse.mark_ended()
    assert trouble(tmp_path, needs_ready=False, at_s=1e12) == ""
    assert "has ended" in trouble(tmp_path, needs_ready=True)


@pytest.mark.timeout(90)
def test_a_runs_supervisor_is_live_while_it_runs_and_once_it_has_ended(tmp_path: Path) -> None:
    run = Run(tmp_path)
    seen: list[str] = []

    def look(snapshot: RunSnapshot) -> None:
        seen.append(trouble(run.run_dir, needs_ready=True))
        run.interrupt(snapshot)

    run.when_live(look)
    assert run.until_end().exit_code == 0
    assert seen == [""]
    os.utime(run.run_dir / NAME, (0, 0))
    assert trouble(run.run_dir, needs_ready=False) == ""


def test_a_probe_finds_the_join_of_its_account(tmp_path: Path) -> None:
    joined = tmp_path / "headrace" / "joined" / "generator-h" / "demo"
    environment = {"XDG_STATE_HOME": str(tmp_path)}
    absent = CliRunner().invoke(headrace, ["fleet", "probe", "live"], env=environment, standalone_mode=False)
    assert absent.return_value == 1 and "no join has begun" in absent.output
    joined.mkdir(parents=True)
    Pulse(joined).beat(0.0, is_ready=True)
    for question in ("live", "ready"):
        found = CliRunner().invoke(headrace, ["fleet", "probe", question], env=environment, standalone_mode=False)
        assert (found.return_value, found.output) == (0, "")


def test_a_probe_imports_little() -> None:
    script = "import sys, pipeline.cli.probe; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert not {"pydantic", "redis", "zmq", "structlog", "msgspec", "numpy", "asyncio"} & set(loaded.stdout.split())
