"""The demo with vLLM's processes in the background, as on a GPU: fifty updates."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ops.demo import task

ROOT = Path(__file__).resolve().parents[2]
_HEADRACE = (sys.executable, "-m", "pipeline.cli")
_UPDATES = 50


@pytest.mark.timeout(1200)
def test_fifty_updates_of_the_demo_lose_no_engine(tmp_path: Path) -> None:
    task.main(["--out", str(tmp_path / "data")])
    settings = (
        "generation.engine=vllm", "generation.vllm.mode=background", f"run.num_updates={_UPDATES}",
        f"run.dir={tmp_path / 'runs'}", "run.name=demo", f"data.train=['{tmp_path / 'data' / 'train.jsonl'}']",
        f"data.evaluation=['{tmp_path / 'data' / 'heldout.jsonl'}']",
    )  # fmt: skip
    words = [word for setting in settings for word in ("--set", setting)]
    run = tmp_path / "runs" / "demo"
    up = subprocess.run(
        [*_HEADRACE, "up", "configs/demo.toml", "--fleet", "configs/fleets/demo.toml", "--plain", *words],
        cwd=ROOT, capture_output=True, text=True, timeout=1100, env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    assert up.returncode == 0, up.stdout + up.stderr
    assert f"finished: {_UPDATES} updates done" in up.stdout
    rows = {path.stem: list(map(json.loads, path.read_text().splitlines())) for path in (run / "logs").glob("*.jsonl")}
    assert {"generator-0", "generator-1"} <= rows.keys()
    assert [row for worker in rows for row in rows[worker] if row["level"] in ("error", "critical")] == []
    assert "teardown_timed_out" not in {row["event"] for worker in rows for row in rows[worker]}
    started = [row["worker"] for row in rows["supervisor"] if row["event"] == "worker_started"]
    assert len(started) == len(set(started)), "a worker was replaced"
