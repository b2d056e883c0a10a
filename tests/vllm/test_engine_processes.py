"""vLLM's processes as their starter sees them: phases on the way up, and nothing left of them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from pipeline.process.descendants import WORKER_MARK

ROOT = Path(__file__).resolve().parents[2]
_PATIENCE_S = 30.0


def test_a_starting_engine_tells_its_phases_and_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    starter = subprocess.Popen(
        [sys.executable, "-m", "tests.vllm.start_core", str(tmp_path)],
        cwd=ROOT, stdout=subprocess.PIPE, text=True, env={**os.environ, WORKER_MARK: "/run#generator-0#"},
    )  # fmt: skip
    try:
        assert starter.stdout is not None
        lines: list[str] = []
        for line in starter.stdout:
            lines.append(line.strip())
            if line.startswith("started"):
                break
        phases = [line.removeprefix("phase vLLM: ") for line in lines if line.startswith("phase")]
        assert phases == ["importing", "loading", "compiling", "capturing graphs"]
        below = [int(pid) for pid in lines[-1].split()[1:]]
        assert below
    finally:
        starter.kill()
        starter.wait(_PATIENCE_S)
    deadline_s = time.monotonic() + _PATIENCE_S
    while left := [pid for pid in below if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < deadline_s, f"{len(left)} of {len(below)} processes outlive the one that started them"
        time.sleep(0.1)
