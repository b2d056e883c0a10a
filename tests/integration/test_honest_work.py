"""Claims about work that takes long: a fleet does not disturb it, and its results are kept."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest

from ops.emulated import OVERRIDES
from tests.integration.fleet import RunningFleet, fleet

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

STUCK_AFTER_S = 3.0
STEP_S = 10 * STUCK_AFTER_S
PACED = (
    *OVERRIDES,
    f"engines.settings.step_s={STEP_S}",
    f"supervisor.stuck_after_s={STUCK_AFTER_S}",
    f"supervisor.drain_timeout_s={STUCK_AFTER_S}",
    "algorithm.name=grpo",
    "algorithm.num_minibatches=1",
    "algorithm.group_size=4",
    "algorithm.groups_per_update=4",
    "data.evaluation=[]",
    "checkpoint.every_updates=1000",
)
"""A step of the policy takes ten times what a piece of work may take, and ten times what a drain
waits for one."""


def _replaced(running: RunningFleet) -> list[str]:
    return [line for line in running.output.read_text().splitlines() if "worker_replaced" in line or "overdue" in line]


@pytest.mark.long
def test_a_step_of_ten_times_stuck_after_s_is_no_death_and_ctrl_c_keeps_every_update(
    tmp_path: Path,
) -> None:
    with fleet(tmp_path, *PACED, "run.num_updates=1000") as running:
        running.wait_until(lambda: running.num_updates() >= 1, "the first update", timeout_s=150.0)

        def amid() -> bool:
            assert _replaced(running) == [], "honest work was taken for dead"
            learner = running.workers().get("learner", {"waiting_for": "", "work": None})
            return learner["waiting_for"] == "compute" and (learner["work"] or {}).get("share", 0.0) > 0.2

        running.wait_until(amid, "the middle of the second update, told by status", timeout_s=60.0)
        learner = running.workers()["learner"]
        assert learner["work"]["kind"] == "update"
        assert learner["work"]["remaining_s"] < 2 * STEP_S
        assert learner["work"]["per_s"] > 0.0
        begun = time.monotonic()
        running.process.send_signal(signal.SIGINT)
        assert running.finish(timeout_s=90.0) == 0
        assert time.monotonic() - begun > 2 * STUCK_AFTER_S, "it was waited for"
        assert _replaced(running) == []
        output = running.output.read_text()
        assert "learner is at compute: update" in output and "tokens/s" in output and " left" in output
    states = [json.loads(path.read_text()) for path in (running.run_dir / "checkpoints").glob("*/state.json")]
    assert max(state["num_updates"] for state in states) == running.num_updates() == 2
