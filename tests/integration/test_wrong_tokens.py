"""A generator of a running fleet samples other tokens than its peers, without an error. The
learner's check finds it, a self-check of the fleet proves it, and it is evicted."""

from __future__ import annotations

from pathlib import Path

import pytest

from ops.drill.fleet import DrillFleet, until
from ops.drill.orders import write_orders
from pipeline.fleet.repair.records import read_steps
from protocol.ids import Role
from tests.integration.trial_fleet import SETTINGS, VERDICT_S

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]
ACTING = (
    "fleet.reward=1",
    "fleet.reference=1",
    "data.evaluation=[]",
    "evaluation.every_updates=0",
    "observer.enabled=true",
    "recovery.policy=act",
    "learner.logprob_check_share=1.0",
)


@pytest.mark.long
def test_the_generator_whose_tokens_are_wrong_is_evicted_and_no_other_is_touched(tmp_path: Path) -> None:
    fleet = DrillFleet(tmp_path, [*SETTINGS, *ACTING], verdict_s=VERDICT_S)

    def evicted() -> list[tuple[str, str]]:
        return [(s.worker, s.sentence) for s in read_steps(fleet.run_dir) if (s.rung, s.outcome) == ("evict", "begun")]

    try:
        fleet.start()
        assert until(lambda: len(fleet.updates()) >= 15 or fleet.is_over(), 120.0, poll_s=0.5) and not fleet.is_over()
        pids = {beat.who.worker: beat.pid for beat in fleet.workers(Role.GENERATOR)}
        assert len(pids) == 3
        write_orders(fleet.orders, "generator-1", {"garbage": True})
        assert until(lambda: evicted() or fleet.is_over(), 150.0, poll_s=0.5) and not fleet.is_over()
        [(worker, sentence)] = evicted()
        assert worker == "generator-1" and "its answer differs from that of 2 others" in sentence
        assert until(lambda: "generator-1" not in {beat.who.worker for beat in fleet.workers(Role.GENERATOR)}, 60.0)
        made = len(fleet.updates())
        assert until(lambda: len(fleet.updates()) > made + 3, 60.0, poll_s=0.5), "the run goes on without it"
        left = {beat.who.worker: beat.pid for beat in fleet.workers(Role.GENERATOR)}
        assert left == {name: pid for name, pid in pids.items() if name != "generator-1"}
        fleet.command("down", str(fleet.run_dir), timeout_s=90.0)
        assert until(fleet.is_over, 90.0, poll_s=0.5)
        audit = fleet.command("ledger", "audit", str(fleet.run_dir))
        assert audit is not None and audit["balances"]
    finally:
        fleet.close()
    fleet.remove()
