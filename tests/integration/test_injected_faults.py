"""Claims about faults inside real workers: each order has its effect, in its worker alone, and
every reader still reads the fleet."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from ops.drill.fleet import until
from ops.drill.orders import write_orders
from pipeline.runtime.registry.contract import Heartbeat
from protocol.ids import Role
from tests.integration.trial_fleet import TrialFleet

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]
LIMIT_S = 60.0
"""Of a machine that others use, too: that a fault has its effect is the claim."""

ORDERS = {
    "generator-0": {"hang": True},
    "generator-1": {"stale": True},
    "generator-2": {"clock": 5.0},
    "reference-0": {"leak": 20.0},
    "learner": {"nan": 3},
}
CUT = ("generator-1", "reward-0")


@pytest.fixture
def on() -> Iterator[TrialFleet]:
    trial = TrialFleet()
    try:
        trial.start()
        yield trial
    finally:
        trial.close()


def counters(beat: Heartbeat, name: str) -> float:
    return beat.counters.get(name, 0.0)


def test_each_order_changes_its_own_worker_and_heartbeats_stay_readable(on: TrialFleet) -> None:
    before = on.fleet.beats()
    for worker, orders in ORDERS.items():
        write_orders(on.fleet.orders, worker, orders)
    on.fleet.switch.write_text(f"raise @{before['reward-1'].pid}")
    on.edges.cut(*CUT)

    def later(first: Heartbeat) -> Heartbeat | None:
        beat = on.fleet.beats()[first.who.worker]
        return beat if beat.at_s > first.at_s + 1.0 else None

    def stands() -> bool:
        first = on.fleet.beats()["generator-0"]
        newer = until(lambda: later(first), LIMIT_S, poll_s=0.2)
        return newer is not None and newer.turns == first.turns

    assert until(stands, LIMIT_S), "a loop hangs, and its heartbeat goes on"
    hung, passed = on.fleet.beats()["generator-0"], dict(on.edges.passed)

    def holds(told: Callable[[dict[str, Heartbeat]], bool]) -> bool:
        return bool(until(lambda: told(on.fleet.beats()), LIMIT_S, poll_s=0.2))

    assert holds(lambda now: counters(now["learner"], "refused_steps") > 0), "and its heartbeat is read"
    assert holds(lambda now: now["generator-2"].policy_version - now["generator-1"].policy_version > 1)
    assert holds(lambda now: now["reference-0"].rss_bytes > before["reference-0"].rss_bytes + 60e6)
    assert holds(lambda now: counters(now["reward-1"], "failed") > 0)
    now = on.fleet.beats()
    assert now["generator-2"].at_s - now["generator-1"].at_s > 3.0, "its clock is ahead"
    assert now["generator-0"].turns == hung.turns
    assert not counters(now["reward-0"], "failed")
    assert now["reference-1"].rss_bytes < before["reference-1"].rss_bytes + 30e6

    def elsewhere(counts: dict[tuple[str, str], int]) -> int:
        return sum(count for (sender, _), count in counts.items() if sender == "generator-2")

    assert until(lambda: elsewhere(on.edges.passed) > elsewhere(passed), LIMIT_S)
    assert on.edges.passed.get(CUT, 0) == passed.get(CUT, 0)
    for worker in ORDERS:
        write_orders(on.fleet.orders, worker, {})
    on.fleet.switch.unlink()
    on.edges.heal(*CUT)
    assert holds(lambda now: now["generator-0"].turns > hung.turns), "orders end"
    assert [beat.who.role for beat in on.fleet.workers(Role.LEARNER)] == [Role.LEARNER]
