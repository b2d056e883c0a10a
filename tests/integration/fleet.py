"""A real fleet for tests: ``headrace up`` as a child process, and the other commands against it,
all by their JSON."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ops.demo import task
from ops.emulated import OVERRIDES
from pipeline import cli
from pipeline.process.descendants import WORKER_MARK, worker_mark

ROOT = Path(__file__).resolve().parents[2]
EMULATED = (
    *OVERRIDES,
    "engines.settings.median_tokens=12",
    "engines.settings.tail=0.8",
    "engines.settings.decode_base_s=2e-3",
    "engines.settings.decode_slot_s=1e-4",
    "engines.settings.scoring_token_s=1e-5",
    "engines.settings.step_s=0.2",
    "generation.num_slots=16",
    "data.evaluation=[]",
    "data.verifier=tests.integration.odd_verifier:judge",
    "reward.overlong=none",
    "reward.processes=1",
)
"""For claims that are about anything but a model: the rest of the fleet is real, and it starts in a
fifth of the time."""


@dataclass(frozen=True)
class RunningFleet:
    """A run and the process of its supervisor."""

    run_dir: Path
    process: subprocess.Popen[bytes]
    output: Path

    def command(self, *arguments: str) -> Any:
        """Run a ``headrace`` command with ``--json`` and return its output."""
        code, printed, complaint = _headrace(*arguments, "--json")
        assert code == 0, complaint
        return json.loads(printed)

    def refused(self, *arguments: str) -> str:
        """Run a ``headrace`` command that is to be refused, and return its output."""
        code, printed, complaint = _headrace(*arguments)
        assert code == 2, (code, printed, complaint)
        return complaint

    def rolled_back(self, *arguments: str) -> Any:
        """Run an update that is to be rolled back by itself, and return its output."""
        code, printed, complaint = _headrace(*arguments, "--json")
        assert code == 1, (code, printed, complaint)
        return json.loads(printed)

    def status(self) -> Any:
        return self.command("status", str(self.run_dir))

    def audit(self) -> Any:
        return self.command("ledger", "audit", str(self.run_dir))

    def workers(self) -> dict[str, dict[str, Any]]:
        return {worker["worker"]: worker for worker in self.status()["workers"]}

    def wait_until(self, condition: Callable[[], Any], what: str, timeout_s: float = 90.0) -> Any:
        """Poll a condition of the run; the fleet's output is shown when it does not come true."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise AssertionError(f"the fleet ended while waiting for {what}:\n{self.output.read_text()}")
            if value := condition():
                return value
            time.sleep(0.2)
        raise AssertionError(f"{what} did not come within {timeout_s} s:\n{self.output.read_text()[-4000:]}")

    def num_updates(self) -> int:
        history = self.run_dir / "history.jsonl"
        return history.read_text().count('"kind": "update"') if history.exists() else 0

    def finish(self, timeout_s: float = 180.0) -> int:
        """Wait for the run's own end and return the exit code."""
        return self.process.wait(timeout_s)


def _headrace(*arguments: str) -> tuple[int, str, str]:
    """Run a command in this process: tests call many, and a start costs half a processor second.
    Return its code, its output and its complaints."""
    printed, complaint = io.StringIO(), io.StringIO()
    with redirect_stdout(printed), redirect_stderr(complaint), pytest.raises(SystemExit) as end:
        cli.main(list(arguments))
    assert isinstance(end.value.code, int)
    return end.value.code, printed.getvalue(), complaint.getvalue()


@contextmanager
def fleet(
    tmp_path: Path,
    *overrides: str,
    resume: Path | None = None,
    arguments: tuple[str, ...] = (),
    of: tuple[str, str] = ("demo", "demo"),
) -> Iterator[RunningFleet]:
    """Start the run and fleet files ``of`` these names with ``overrides``, or resume a run with
    further ``arguments``; kill its processes at the end."""
    data = tmp_path / "data"
    task.main(["--out", str(data)])
    command = [sys.executable, "-m", "pipeline.cli", "up"]
    settings = list(overrides)
    if resume is not None:
        command += ["--resume", str(resume), *arguments]
    else:
        command += [f"configs/{of[0]}.toml", "--fleet", f"configs/fleets/{of[1]}.toml"]
        settings = [
            f"run.dir={tmp_path / 'runs'}",
            "run.name=test",
            f"data.train=['{data / 'train.jsonl'}']",
            f"data.evaluation=['{data / 'heldout.jsonl'}']",
            *overrides,
        ]
    command += [argument for setting in settings for argument in ("--set", setting)]
    output = tmp_path / "output.txt"
    with output.open("wb") as file:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
    running = RunningFleet(tmp_path / "runs" / "test", process, output)
    try:
        yield running
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.send_signal(signal.SIGINT)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()


def kill(run: RunningFleet, worker: str, timeout_s: float = 60.0) -> dict[str, Any]:
    """``kill -9`` the process that a worker is now; return its last heartbeat.

    A number that was read a moment ago may have become another process's. So the process is held by
    a descriptor, and known by its environment, before it is killed."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        beat = run.workers().get(worker)
        if beat is not None and killed(beat["pid"], worker_mark(run.run_dir, worker)):
            return beat
        time.sleep(0.1)
    raise AssertionError(f"{worker} had no process for {timeout_s} s:\n{run.output.read_text()[-4000:]}")


def killed(pid: int, mark: str) -> bool:
    """Kill a process that has the mark of a worker; False when there is none of this number."""
    try:
        held = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    try:
        if os.fsencode(f"{WORKER_MARK}={mark}") not in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            return False
        signal.pidfd_send_signal(held, signal.SIGKILL)
    except (ProcessLookupError, FileNotFoundError):
        return False
    finally:
        os.close(held)
    return True
