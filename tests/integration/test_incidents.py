"""Claims about incidents on a real fleet: each fault is named by its component, and no other
component is. How soon, `python -m ops.bench.trace` measures on emulated fleets."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest

from ops.drill.orders import FOLDER, write_orders
from pipeline.fleet.incidents.records import RunIncidents
from pipeline.ledger.address import read_address
from tests.integration.fleet import EMULATED, ROOT, RunningFleet, fleet
from tests.mute import keep_busy

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

PATIENT = (
    "run.num_updates=100000",
    "supervisor.silent_after_s=300",
    "supervisor.stopped_after_s=300",
    "supervisor.stuck_after_s=300",
    "ledger.scoring_deadline_s=300",
    "algorithm.groups_per_update=4",
)
"""Settings by which no fault of the test ends by itself, however busy the machine."""
NAMED_WITHIN_S = 45.0
MUTE_S = 50.0
"""The supervisor starts a mute ledger server anew after a minute."""
NUM_MOMENTS = 10
"""That the observer sees a fleet at work in: what a role usually takes is known then."""


def kinds(run: RunningFleet) -> dict[str, tuple[str, ...]]:
    return {incident.component: incident.kinds for incident in RunIncidents(run.run_dir).read()}


def stands(run: RunningFleet, worker: str) -> tuple[str, ...]:
    return next(one.stacks for one in RunIncidents(run.run_dir).read() if one.component == worker)


def num_moments(run: RunningFleet) -> float:
    return run.workers().get("observer", {}).get("counters", {}).get("moments", 0)


def test_a_frozen_generator_a_hung_scorer_and_a_mute_ledger_are_named_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    orders = tmp_path / "orders"
    monkeypatch.setenv(FOLDER, str(orders))
    monkeypatch.setenv("PYTHONPATH", f"{ROOT / 'ops' / 'drill' / 'shim'}{os.pathsep}{ROOT}")
    with fleet(tmp_path, *EMULATED, *PATIENT) as run:
        run.wait_until(lambda: run.num_updates() >= 2, "updates")
        begun = num_moments(run)
        run.wait_until(lambda: num_moments(run) >= begun + NUM_MOMENTS, "the usual pace")
        assert kinds(run) == {}
        frozen = run.workers()["generator-1"]["pid"]
        os.kill(frozen, signal.SIGSTOP)
        write_orders(orders, "reward-0", {"hang": True})
        try:
            run.wait_until(lambda: kinds(run).keys() >= {"generator-1", "reward-0"}, "both", NAMED_WITHIN_S)
            assert run.wait_until(lambda: stands(run, "reward-0"), "stacks")[0].startswith("reward-0 stands in ")
        finally:
            os.kill(frozen, signal.SIGCONT)
            write_orders(orders, "reward-0", {})
        found = kinds(run)
        assert found["generator-1"] == ("silent",)
        assert set(found["reward-0"]) <= {"stuck", "hung"}
        address = read_address(run.run_dir)
        assert address is not None
        # at work: one at rest would be started anew within seconds
        threading.Thread(target=keep_busy, args=(address.url, MUTE_S), daemon=True).start()
        run.wait_until(lambda: "ledger" in kinds(run), "the ledger", NAMED_WITHIN_S)
        assert kinds(run) == found | {"ledger": ("silent",)}
