"""Claims about the way in which fleet tests kill a worker: no other process is hit, even under a
reused number."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from pipeline.process.descendants import WORKER_MARK, worker_mark
from tests.integration.fleet import killed


def test_a_process_is_killed_only_while_it_is_the_worker(tmp_path: Path) -> None:
    mark = worker_mark(tmp_path, "generator-0")
    sleeping = [sys.executable, "-c", "import time; time.sleep(60)"]
    other = os.environ | {WORKER_MARK: worker_mark(tmp_path, "generator-1")}
    with started(sleeping, other) as stranger:
        assert not killed(stranger.pid, mark)
        assert stranger.poll() is None
        stranger.kill()
    with started(sleeping, os.environ | {WORKER_MARK: mark}) as worker:
        assert killed(worker.pid, mark)
        assert worker.wait(30) == -signal.SIGKILL
    assert not killed(worker.pid, mark)


def started(command: list[str], environment: dict[str, str]) -> subprocess.Popen[bytes]:
    """Start a process, and wait until the kernel shows its environment."""
    process = subprocess.Popen(command, env=environment)
    while not Path(f"/proc/{process.pid}/environ").read_bytes():
        time.sleep(0.01)
    return process
