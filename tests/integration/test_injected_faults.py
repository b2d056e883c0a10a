"""Claims about faults inside real workers: each order has its effect, in its worker alone, and
every reader still reads the fleet."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest

from ops.drill.catalogue import Injection, entry
from ops.drill.fleet import until
from pipeline.runtime.registry.contract import Heartbeat
from protocol.ids import Role
from tests.integration.trial_fleet import TrialFleet

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]
LIMIT_S = 60.0
"""Of a machine that others use, too: that a fault has its effect is the claim."""

FAULTS = {
    "hung loop of a generator": "generator-0",
    "stale weights": "generator-1",
    "clock 5 s ahead": "generator-2",
    "verifiers raise": "reward-1",
    "leak of 20 MB/s": "reference-0",
    "loss is no number in one step of three": "learner",
}


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
    injections = [Injection(on.site, on.edges, random.Random(0), target) for target in FAULTS.values()]
    for name, each in zip(FAULTS, injections, strict=True):
        entry(name).begin(each)
    edge = entry("cut edge")
    cut = Injection(on.site, on.edges, random.Random(0), "generator-1")
    edge.begin(cut)
    (way,) = (one.split(">") for one in cut.right)

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
    assert on.edges.passed.get((way[0], way[1]), 0) == passed.get((way[0], way[1]), 0)
    for each in (*injections, cut):
        each.end()
    assert holds(lambda now: now["generator-0"].turns > hung.turns), "orders end"
    assert [beat.who.role for beat in on.fleet.workers(Role.LEARNER)] == [Role.LEARNER]
