"""Claims about ``headrace up --on ray``: the demo, on a real cluster of several nodes."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ops.demo import task
from tests.own_server import own_server
from tests.ray.cluster import ROOT, RayCluster

pytestmark = pytest.mark.timeout(360)

SETTINGS = (
    "run.num_updates=3",
    "algorithm.groups_per_update=4",
    "evaluation.num_prompts=32",
    "fleet.reference=0",
    "reference.always=false",
    'launch.roles=["generator", "reward"]',
    "wire.transport=tcp",
    "wire.host=127.0.0.1",
    "launch.poll_s=0.5",
)
_HEADRACE = (sys.executable, "-m", "pipeline.cli")


def test_the_demo_runs_on_a_cluster_of_several_nodes(cluster: RayCluster, tmp_path: Path) -> None:
    task.main(["--out", str(tmp_path / "data")])
    password, run_dir = secrets.token_hex(16), tmp_path / "runs" / "demo"
    with own_server(
        tmp_path / "ledger", f"requirepass {password}", url=f"redis://:{password}@127.0.0.1:{{port}}/0"
    ) as url:
        settings = (
            *SETTINGS, f"run.dir={tmp_path / 'runs'}", "run.name=demo", f"data.train=['{tmp_path / 'data' / 'train.jsonl'}']",
            f"data.evaluation=['{tmp_path / 'data' / 'heldout.jsonl'}']",
            f"launch.ledger_url=redis://{url.rpartition('@')[2]}",
        )  # fmt: skip
        words = [word for setting in settings for word in ("--set", setting)]
        files = ("configs/demo.toml", "--fleet", "configs/fleets/demo.toml")
        environment = {**os.environ, "REDIS_URL": url}
        output = tmp_path / "up.out"
        with output.open("wb") as file:
            up = subprocess.Popen(
                [*_HEADRACE, "up", *files, "--on", "ray", "--address", cluster.address, "--plain", *words], cwd=ROOT,
                stdout=file, stderr=file, env=environment, start_new_session=True,
            )  # fmt: skip
        try:
            places = until(lambda: places_of(run_dir), up, output)
            assert len({place for worker, place in places.items() if worker.startswith("generator")}) == 2, places
            assert code_of(up, output) == 0, output.read_text()
        finally:
            if up.poll() is None:
                os.killpg(up.pid, signal.SIGKILL)
        audit = json.loads(
            subprocess.check_output([*_HEADRACE, "ledger", "audit", str(run_dir), "--json"], env=environment)
        )
    assert audit["balances"] is True and audit["groups"]["trained"] == 3 * 4
    assert "finished: 3 updates done" in output.read_text()
    secret = json.loads((run_dir / "tokens" / "generator.token").read_text())["secret"]
    texts = [path for path in (output, *run_dir.rglob("*.jsonl"), *cluster.session.rglob("*.*")) if path.is_file()]
    assert not [
        path for path in texts if secret.encode() in path.read_bytes() or password.encode() in path.read_bytes()
    ]


def places_of(run_dir: Path) -> dict[str, str]:
    """Return the places of running workers, once all three have one, by the supervisor's log."""
    log = run_dir / "logs" / "supervisor.jsonl"
    rows = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    places = {
        row["worker"]: row["place"] for row in rows if row.get("event") == "job" and row.get("state") == "running"
    }
    return places if len(places) == 3 else {}


def code_of(up: subprocess.Popen[bytes], output: Path) -> int:
    try:
        return up.wait(180)
    except subprocess.TimeoutExpired:
        raise AssertionError(output.read_text()) from None


def until(condition: Callable[[], Any], up: subprocess.Popen[bytes], output: Path) -> Any:
    deadline = time.monotonic() + 90
    while not (value := condition()):
        assert up.poll() is None and time.monotonic() < deadline, output.read_text()
        time.sleep(0.1)
    return value
