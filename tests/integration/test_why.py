"""Claims about ``headrace why`` and ``headrace ledger requeue`` on a real fleet whose workers freeze and
die."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.integration.fleet import EMULATED, RunningFleet, fleet, kill

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]

SMALL = (
    *EMULATED,
    "run.num_updates=100000",
    "algorithm.name=tppo",
    "algorithm.groups_per_update=2",
    "algorithm.group_size=8",
    "value.batch_trajectories=16",
    "value.pretrain_steps=1",
    "ledger.scoring_deadline_s=3",
    "supervisor.backoff_s=10",
    "supervisor.silent_after_s=60",
    "supervisor.stopped_after_s=60",
    "ledger.lease_s=60",
)


def chain_of(run: RunningFleet, who: str, *causes: str) -> dict[str, Any] | None:
    """The chain of waits whose root is ``who``, for one of these causes, when there is one."""
    chains = run.command("why", str(run.run_dir))["chains"]
    return next((chain for chain in chains if chain["who"] == who and chain["cause"] in causes), None)


def goes_on(run: RunningFleet) -> None:
    seen = run.num_updates()
    run.wait_until(lambda: run.num_updates() >= seen + 2, "updates")
    assert run.audit()["balances"] is True


@pytest.mark.long
def test_frozen_generators_and_a_dead_value_worker_are_roots_and_open_leases_no_loss(tmp_path: Path) -> None:
    with fleet(tmp_path, *SMALL) as run:
        run.wait_until(lambda: run.num_updates() >= 2, "the second update", 200.0)
        frozen = [worker["pid"] for name, worker in run.workers().items() if name.startswith("generator")]
        # both: one alone may hold nothing just then, and the run then waits for no generator
        for pid in frozen:
            os.kill(pid, signal.SIGSTOP)
        try:
            found = run.wait_until(
                lambda: chain_of(run, "generator-0", "silent") or chain_of(run, "generator-1", "silent"),
                "a frozen generator to be named",
            )
        finally:
            for pid in frozen:
                os.kill(pid, signal.SIGCONT)
        assert found["links"][0].startswith("learner ")
        assert found["links"][-1].startswith(f"{found['who']} is silent for")
        goes_on(run)

        kill(run, "value")
        found = run.wait_until(lambda: chain_of(run, "value", "absent"), "the dead value worker to be named")
        assert found["outlook"] == "mends"
        assert "chunks wait in the ledger" in found["next"]
        goes_on(run)

        # of workers that are alive: they lease it again, or find out with their next write
        for _ in range(2):
            opened = [
                run.command("ledger", "requeue", "--worker", f"generator-{n}", "--run", str(run.run_dir))
                for n in (0, 1)
            ]
            assert all(answer["unknown"] == [] for answer in opened)
            run.command("ledger", "requeue", "--field", "reward", "--run", str(run.run_dir))
            goes_on(run)
        log = (run.run_dir / "logs" / "supervisor.jsonl").read_text()
        assert '"exit_code": 1' not in log, "a generator fell over what was taken from it"
        run.command("down", str(run.run_dir))
        assert run.finish() == 0, run.output.read_text()
        assert run.audit()["balances"] is True
        assert run.command("why", str(run.run_dir))["chains"][0]["cause"] == "nobody"
