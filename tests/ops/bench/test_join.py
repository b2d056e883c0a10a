"""The join bench reads each step, and the seconds of loading, in the logs of the processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ops.bench.join import Joined, loading_s, read_steps

BEGAN_S = 1735689600.0
LINES = {
    "supervisor-hosta-x3f9a1-0": [
        ("manifest_received", 0.7, {}),
        ("starter_ready", 5.0, {"seconds": 4.0}),
        ("worker_started", 5.1, {}),
    ],
    "generator-hosta-x3f9a1-0": [
        ("worker_started", 5.2, {}),
        ("model_loaded", 5.5, {"seconds": 0.25}),
        ("first_work_done", 6.0, {}),
        ("first_work_done", 9.0, {}),
    ],
}


def test_each_step_is_the_first_line_of_its_process_and_loading_a_sum(tmp_path: Path) -> None:
    logs = tmp_path / "generator-hosta" / "join" / "logs"
    logs.mkdir(parents=True)
    for worker, lines in LINES.items():
        told = [
            {"event": event, "at": f"2025-01-01T00:00:{at_s:09.6f}Z", "role": worker.partition("-")[0], **more}
            for event, at_s, more in lines
        ]
        (logs / f"{worker}.jsonl").write_text("\n".join([*map(json.dumps, told), '{"event": "half']))
    steps = read_steps(tmp_path, BEGAN_S)
    assert steps == pytest.approx(
        {
            "manifest_received": 0.7,
            "starter_ready": 5.0,
            "worker_started": 5.2,
            "model_loaded": 5.5,
            "first_work_done": 6.0,
        }
    )
    joined = Joined(steps, loading_s(tmp_path))
    assert joined.total_s == pytest.approx(6.0) and joined.beyond_s == pytest.approx(1.75)
