"""A ledger that answers most workers slowly is named, and explains slowness elsewhere."""

from __future__ import annotations

import msgspec

from pipeline.fleet.incidents.book import Suspicion
from pipeline.fleet.signs import FOLLOWS_S, LEDGER, LedgerPace
from pipeline.fleet.state import Worker
from pipeline.fleet.suspicions import FleetSuspicions, explained
from pipeline.runtime.registry.entries import Vitals
from protocol.ids import Role
from tests.pipeline.fleet.live_fleet import BREAKS_S, LiveFleet


def fleet(waits_ms: list[float]) -> list[Worker]:
    beats = LiveFleet(generators=len(waits_ms) - 1, rewards=0).at(9)
    return [
        msgspec.structs.replace(beat, vitals=Vitals(ledger_rtt_ms=wait_ms))
        for beat, wait_ms in zip(beats, waits_ms, strict=True)
    ]


def looks(waits_ms: list[list[float]], answers: LedgerPace | None = None) -> list[int]:
    """Return the seconds in which the ledger is suspected."""
    answers = answers or LedgerPace()
    return [second for second, now in enumerate(waits_ms) if answers.observe(second, 1e9 + second, fleet(now))]


def test_a_ledger_that_most_workers_wait_for_is_named_and_one_worker_is_not() -> None:
    usual, slow = [1.5, 2.0, 3.0, 2.0], [150.0, 220.0, 180.0, 2.0]
    assert looks([usual] * 30 + [slow] * 10) == [*range(33, 40)]
    assert looks([usual] * 30 + [[1.5, 2.0, 900.0, 2.0]] * 30) == [], "its own way to the ledger"
    assert looks([usual] * 30 + [slow] * 2 + [usual] * 30) == [], "a moment"
    assert looks([usual] * 30 + [[12.0, 20.0, 30.0, 25.0]] * 30) == [], "still quick"


def test_a_far_ledger_is_usual_and_its_usual_answers_are_not_slow() -> None:
    assert looks([[80.0, 90.0, 85.0]] * 60) == []
    assert looks([[80.0, 90.0, 85.0]] * 60 + [[200.0, 210.0, 220.0]] * 20) == []
    assert looks([[80.0, 90.0, 85.0]] * 60 + [[900.0, 800.0, 700.0]] * 20) == [*range(63, 80)]


def test_what_is_slow_becomes_usual_within_an_hour() -> None:
    named = looks([[2.0] * 4] * 60 + [[100.0] * 4] * 3600)
    assert named[0] == 63 and named[-1] < 3600


def test_silent_workers_and_fleets_of_two_show_nothing() -> None:
    answers = LedgerPace()
    for second in range(30):
        answers.observe(second, second, fleet([2.0, 2.0, 2.0, 2.0]))
    old = [msgspec.structs.replace(beat, silent_s=30.0) for beat in fleet([900.0] * 4)]
    assert [answers.observe(second, second, old) for second in range(30, 60)] == [[]] * 30
    assert looks([[2.0] * 2] * 30 + [[900.0] * 2] * 30) == []


def test_slow_answers_explain_slowness_for_a_while_after_them() -> None:
    answers = LedgerPace()
    looks([[2.0] * 4] * 30 + [[300.0] * 4] * 5, answers)
    assert answers.explain(34.0 + FOLLOWS_S)
    assert not answers.explain(35.0 + FOLLOWS_S)
    assert not LedgerPace().explain(0.0)


def suspicion(component: str, kind: str) -> Suspicion:
    return Suspicion(component, kind, 3.0, "words")


def test_slow_workers_are_evidence_for_a_slow_ledger_and_dead_workers_are_not() -> None:
    ledger = suspicion(LEDGER, "ledger")
    slowed = [suspicion("reward-0", "slow"), suspicion("reward-1", "clock"), suspicion("a>b", "slow_link")]
    others = [suspicion("reward-2", "silent"), suspicion("learner", "disk")]
    first, *rest = explained([*slowed, *others], [ledger])
    assert (first.component, rest) == (LEDGER, others)
    assert first.evidence == ("reward-0 is slow: words", "reward-1 is clock: words", "a>b is slow_link: words")
    assert explained([*slowed, *others], []) == others, "before it is certain, and while it recovers"


def test_a_clock_that_differs_on_while_the_ledger_was_slow_is_named_afterwards() -> None:
    live, finder = LiveFleet(), FleetSuspicions()

    def late(since: int, beat: Worker) -> Worker:
        assert beat.vitals is not None
        vitals = msgspec.structs.replace(beat.vitals, ledger_rtt_ms=200.0 if since < 20 else 0.4)
        ahead_s = 5.0 if beat.who.worker == "reward-1" else 0.0
        return msgspec.structs.replace(beat, vitals=vitals, clock_ahead_s=ahead_s)

    for role in (Role.GENERATOR, Role.REWARD, Role.LEARNER):
        live.change(role, late)
    named = dict[str, int]()
    for second in range(BREAKS_S + 60):
        _, found = finder.observe(second + 0.3, 1e9 + second, list(live.at(second)), live.published(second))
        for one in found:
            named.setdefault(one.component, second - BREAKS_S)
    assert named.keys() == {LEDGER, "reward-1"}
    assert named[LEDGER] < 10 and 20 + FOLLOWS_S - 2 <= named["reward-1"] <= 20 + FOLLOWS_S + 5


def test_clocks_that_are_read_late_after_an_outage_are_not_blamed() -> None:
    live, finder = LiveFleet(), FleetSuspicions()

    def late(since: int, beat: Worker) -> Worker:
        # what was under way when the server stopped is read after its return
        ahead_s = -1.5 if since < 15 and beat.who.worker in ("reward-1", "generator-0") else 0.0
        return msgspec.structs.replace(beat, clock_ahead_s=ahead_s)

    for role in (Role.GENERATOR, Role.REWARD):
        live.change(role, late)
    named = set[str]()
    for second in range(BREAKS_S + 50):
        if BREAKS_S <= second < BREAKS_S + 12:
            found = finder.away(second + 0.3, 1e9 + second, second, "no answer")
        else:
            _, found = finder.observe(second + 0.3, 1e9 + second, list(live.at(second)), live.published(second))
        named |= {one.component for one in found}
    assert named == {LEDGER}
