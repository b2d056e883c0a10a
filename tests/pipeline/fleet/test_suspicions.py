"""Suspicions of a fleet: each fault has its component and no other, and healthy waits have none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import msgspec
import pytest

from pipeline.fleet.flow.heartbeats import RowMaker
from pipeline.fleet.incidents.book import Suspicion
from pipeline.fleet.incidents.records import FoundCause
from pipeline.fleet.state import Worker
from pipeline.fleet.suspicions import LEDGER, FleetSuspicions, _has_more_work, joined
from pipeline.ledger.types import REFUSAL_WORDS, Refusal
from pipeline.process.work import ServiceSums, WorkReport
from pipeline.runtime.registry.contract import LinkReport, WaitingFor
from protocol.ids import Role
from tests.pipeline.fleet.live_fleet import BREAKS_S, VERSION_S, LiveFleet, blamed, standing, with_counts

GENERATORS, REWARDS = Role.GENERATOR, Role.REWARD


def still(beat: Worker, since: int, kind: WaitingFor = WaitingFor.COMPUTE) -> Worker:
    """Its main loop does not turn; a thread of its own sends the heartbeat."""
    stands = standing(beat, since, kind, held=4 if kind is WaitingFor.COMPUTE else 0)
    assert stands.vitals is not None
    vitals = msgspec.structs.replace(stands.vitals, loop_lag_ms=1000.0 * since)
    turned_at_s = beat.turned_at_s - since
    return msgspec.structs.replace(stands, vitals=vitals, turns=beat.turns - 20 * since, turned_at_s=turned_at_s)


def links(beat: Worker, change: Callable[[LinkReport], LinkReport]) -> Worker:
    return msgspec.structs.replace(beat, links=tuple(change(link) for link in beat.links))


# -- faults ----------------------------------------------------------------------------------------


def test_a_frozen_generator_is_the_only_component_and_has_a_cause() -> None:
    fleet = LiveFleet(silent={"generator-1": (BREAKS_S, 1000)})
    (only,) = fleet.suspected()
    assert (only.component, only.kind, only.role) == ("generator-1", "silent", "generator")
    finder = FleetSuspicions()
    fleet.suspected(BREAKS_S + 9, finder)
    _, (later,) = finder.observe(BREAKS_S + 9.3, 0.0, list(fleet.at(BREAKS_S + 9)), fleet.published(BREAKS_S + 9))
    assert later.causes[0].component == "generator-1"
    assert any("no heartbeat" in words for words in later.evidence), "the watch's finding is kept as evidence"


def test_a_hung_scorer_is_named_and_the_generators_behind_it_are_not() -> None:
    fleet = LiveFleet(rewards=1)
    fleet.change("reward-0", lambda since, beat: still(beat, since))
    fleet.wait(GENERATORS, WaitingFor.ROOM, "reward-0 to read", held=4)
    fleet.wait("learner", WaitingFor.INPUT, "0 of 4 ready")
    found = fleet.suspected()
    assert {one.component for one in found} == {"reward-0"}
    assert found[0].kind in ("stuck", "hung")


def test_a_stall_that_a_single_piece_interrupts_is_suspected_again() -> None:
    fleet, finder = LiveFleet(), FleetSuspicions()

    def hangs(since: int, beat: Worker) -> Worker:
        stands = still(beat, since)
        return msgspec.structs.replace(stands, progress=stands.progress + (since >= 9))

    fleet.change("generator-2", hangs)
    fleet.suspected(BREAKS_S + 9, finder)
    seen = dict[int, list[tuple[str, str]]]()
    for second in range(BREAKS_S + 9, BREAKS_S + 29):
        _, found = finder.observe(second + 0.3, 1e9 + second, list(fleet.at(second)), fleet.published(second))
        seen[second - BREAKS_S] = blamed(found)
    assert ("generator-2", "stuck") not in seen[11], "it was interrupted"
    assert ("generator-2", "stuck") in seen[28]


def test_two_faults_at_once_are_two_suspicions() -> None:
    fleet = LiveFleet(silent={"generator-1": (BREAKS_S, 1000)})
    fleet.change("reward-0", lambda since, beat: still(beat, since))
    assert {one.component for one in fleet.suspected()} == {"generator-1", "reward-0"}


def test_a_main_loop_that_stands_in_an_idle_wait_is_named_and_not_its_link() -> None:
    fleet = LiveFleet()
    fleet.change("reward-0", lambda since, beat: still(beat, since, WaitingFor.INPUT))
    assert blamed(fleet.suspected()) == [("reward-0", "hung")]


def test_a_link_that_delivers_nothing_is_named_and_neither_of_its_ends() -> None:
    fleet = LiveFleet()

    def cut(since: int, beat: Worker) -> Worker:
        return links(
            beat,
            lambda link: (
                msgspec.structs.replace(link, received=link.received - 2 * since, done=link.done - 2 * since)
                if link.name == "generator-1>reward-2"
                else link
            ),
        )

    fleet.change("reward-2", cut)
    assert blamed(fleet.suspected()) == [("generator-1>reward-2", "undelivered")]


def test_several_workers_that_wait_for_the_ledger_name_the_ledger_alone() -> None:
    fleet = LiveFleet()
    for role in (GENERATORS, REWARDS, Role.LEARNER):
        fleet.wait(role, WaitingFor.LEDGER, "no answer", held=4)
    assert blamed(fleet.suspected()) == [(LEDGER, "ledger")]


def test_a_generator_that_takes_no_weights_is_named_by_their_link_or_itself() -> None:
    fleet = LiveFleet()
    fleet.change("generator-2", lambda _, beat: msgspec.structs.replace(beat, policy_version=(BREAKS_S - 1) // 5))
    (only, *others) = fleet.suspected(BREAKS_S + 60)
    assert only.component in ("learner>generator-2", "generator-2")
    assert {one.component for one in others} <= {"generator-2"}


def slower(times: float) -> Callable[[int, Worker], Worker]:
    """Its pieces take so many times as long, and it has work all the time."""

    def change(since: int, beat: Worker) -> Worker:
        slow = with_counts(beat, since)
        assert slow.vitals is not None
        (kind, sums), made = next(iter(slow.vitals.service.items())), int(4 * since / times)
        service = {kind: ServiceSums(sums.pieces + made, sums.seconds + 0.2 * times * made, sums.size + 100 * made)}
        vitals = msgspec.structs.replace(slow.vitals, service=service)
        return msgspec.structs.replace(slow, vitals=vitals, progress=slow.progress + made, links=beat.links)

    return change


def recovered(times: float, after_s: int) -> Callable[[int, Worker], Worker]:
    """It was so many times slower for so long, and has its usual pace since then."""

    def change(since: int, beat: Worker) -> Worker:
        lost = after_s - int(after_s / times)
        behind = with_counts(beat, lost)
        assert behind.vitals is not None
        (kind, sums) = next(iter(behind.vitals.service.items()))
        # pieces that took longer
        service = {kind: ServiceSums(sums.pieces, sums.seconds + 0.8 * lost, sums.size)}
        return msgspec.structs.replace(
            behind, vitals=msgspec.structs.replace(behind.vitals, service=service), links=beat.links
        )

    return change


@pytest.mark.parametrize(("times", "is_named"), [(1.6, False), (6.0, True)])
@pytest.mark.parametrize("generators", [2, 3, 4])
def test_a_worker_that_is_several_times_slower_than_its_role_is_named(
    generators: int, times: float, is_named: bool
) -> None:
    fleet = LiveFleet(generators=generators)
    fleet.change("generator-1", slower(times))
    found = fleet.suspected(BREAKS_S + 30)
    assert {one.component for one in found} == ({"generator-1"} if is_named else set())


def test_a_lone_generator_has_no_role_to_be_slower_than() -> None:
    fleet = LiveFleet(generators=1)
    fleet.change("generator-0", slower(3.0))
    assert [one for one in fleet.suspected(BREAKS_S + 60) if one.kind == "slow"] == []


@pytest.mark.parametrize("rewards", [2, 3])
def test_workers_of_a_small_role_that_become_slow_together_are_not_blamed(rewards: int) -> None:
    fleet = LiveFleet(rewards=rewards)
    fleet.change(REWARDS, slower(6.0))
    assert fleet.suspected(BREAKS_S + 60) == []


def test_a_slow_ledger_is_named_alone() -> None:
    """N4: every answer of the ledger takes 200 ms, and everything goes at half the pace."""
    fleet = LiveFleet()

    def waits(since: int, beat: Worker) -> Worker:
        half = with_counts(beat, since // 2)
        assert half.vitals is not None
        return msgspec.structs.replace(half, vitals=msgspec.structs.replace(half.vitals, ledger_rtt_ms=200.0))

    for role in (GENERATORS, REWARDS, Role.LEARNER):
        fleet.change(role, waits)
    assert blamed(fleet.suspected()) == [(LEDGER, "ledger")]


def test_a_standing_main_loop_is_no_consequence_of_a_cause_that_it_would_wait_for() -> None:
    fleet = LiveFleet(rewards=2)
    fleet.change("generator-1", lambda since, beat: standing(beat, since, WaitingFor.COMPUTE, held=4))
    fleet.change("reward-1", lambda since, beat: still(beat, since, WaitingFor.INPUT))
    assert {one.component for one in fleet.suspected()} == {"generator-1", "reward-1"}


def test_slowness_that_has_ended_is_not_named_by_a_mean_of_minutes() -> None:
    fleet, finder = LiveFleet(), FleetSuspicions()
    fleet.change("generator-1", slower(1.9))
    named = list[int]()
    for second in range(BREAKS_S + 400):
        if second == BREAKS_S + 200:
            # it is healthy again, and its counters go on
            fleet.changes["generator-1"] = recovered(1.9, 200)
        _, found = finder.observe(second + 0.3, 1e9 + second, list(fleet.at(second)), fleet.published(second))
        named += [second - BREAKS_S for one in found if one.component == "generator-1"]
    assert named and named[0] < 140 and named[-1] < 210


def test_a_worker_that_has_anothers_work_is_not_slow_by_itself() -> None:
    errors = Suspicion("reward-1", "errors", 5.0, "errors", role="reward")
    slow = Suspicion("reward-0", "slow", 5.0, "service_ratio", role="reward")
    cause = FoundCause(component="reward-0", kind="slow", confidence=0.5, evidence=("six times as long",))
    assert _has_more_work(slow, [errors, slow])
    assert not _has_more_work(slow, [replace(errors, role="generator"), slow])
    assert not _has_more_work(slow, [replace(errors, kind="leak"), slow])
    assert not _has_more_work(replace(slow, causes=(cause,)), [errors, slow]), "its pieces take much longer"
    assert not _has_more_work(errors, [errors, slow])


def test_an_outage_of_the_registry_names_the_ledger_and_no_worker_afterwards() -> None:
    fleet, finder = LiveFleet(), FleetSuspicions()
    assert fleet.suspected(BREAKS_S, finder) == []
    away: list[Suspicion] = []
    for second in range(BREAKS_S, BREAKS_S + 20):
        away = finder.away(second + 0.3, 1e9 + second, second, "no server answers")
        assert {one.component for one in away} <= {LEDGER}
    assert blamed(away) == [(LEDGER, "silent")]
    # their heartbeats come back one after another, and their counters stood meanwhile
    last = {name: BREAKS_S + 20 + place for place, name in enumerate(fleet.names)}
    fleet.silent = {name: (BREAKS_S - 1, back) for name, back in last.items()}
    for second in range(BREAKS_S + 20, BREAKS_S + 60):
        _, found = finder.observe(second + 0.3, 1e9 + second, list(fleet.at(second)), fleet.published(second))
        assert found == [], second


# -- healthy waits ---------------------------------------------------------------------------------

REFUSED = {
    "a paused run": Refusal.PAUSED,
    "exhausted prompts": Refusal.EXHAUSTED,
    "closed admission": Refusal.CLOSED,
    "used up credit": Refusal.NO_CREDIT,
}


@pytest.mark.parametrize("refusal", REFUSED.values(), ids=REFUSED)
def test_generators_that_get_no_work_and_all_behind_them_are_not_blamed(refusal: Refusal) -> None:
    fleet = LiveFleet(published_stands=True)
    fleet.wait(GENERATORS, WaitingFor.CREDIT, REFUSAL_WORDS[refusal])
    fleet.wait(REWARDS, WaitingFor.INPUT, "its mailbox")
    fleet.wait("learner", WaitingFor.INPUT, "0 of 4 ready")
    assert fleet.suspected() == []


def long_tail(fleet: LiveFleet) -> None:
    """N1: one long response is left; all others wait for it."""
    fleet.wait(GENERATORS, WaitingFor.CREDIT, REFUSAL_WORDS[Refusal.NO_CREDIT], for_s=30)
    fleet.wait(REWARDS, WaitingFor.INPUT, "its mailbox", for_s=30)
    fleet.wait("learner", WaitingFor.INPUT, "3 of 4 ready", for_s=30)
    fleet.change(
        "generator-1",
        lambda since, beat: msgspec.structs.replace(beat, links=with_counts(beat, since if since < 30 else 0).links),
    )


def weight_sync(fleet: LiveFleet) -> None:
    """N2: all wait until generators have taken a version."""
    fleet.wait("learner", WaitingFor.WEIGHTS, "generator-0 (version 10), generator-1 (version 10) to take 12", for_s=8)
    fleet.wait(GENERATORS, WaitingFor.WEIGHTS, "a newer version that is announced", for_s=8, held=4)
    fleet.wait(REWARDS, WaitingFor.INPUT, "its mailbox", for_s=8)


def collection(fleet: LiveFleet) -> None:
    """N3: one process stands for two seconds."""
    fleet.change("reward-1", lambda since, beat: still(beat, since) if since < 3 else beat)


def load(fleet: LiveFleet) -> None:
    """N5: every piece takes twice as long, for all."""

    def heavy(since: int, beat: Worker) -> Worker:
        assert beat.vitals is not None
        kind, sums = next(iter(beat.vitals.service.items()))
        service = {kind: ServiceSums(sums.pieces, sums.seconds + 0.8 * since, sums.size)}
        return msgspec.structs.replace(beat, vitals=msgspec.structs.replace(beat.vitals, service=service))

    for role in (GENERATORS, REWARDS):
        fleet.change(role, heavy)


def evaluation(fleet: LiveFleet) -> None:
    """N6: generators and scorers evaluate, and the learner waits for them."""
    fleet.published_stands = True
    fleet.wait("learner", WaitingFor.INPUT, "evaluation 3")


def scale(fleet: LiveFleet) -> None:
    """N7: one generator starts, for half a minute; another drains and leaves."""
    fleet.joined = {"generator-4": 30}
    fleet.change(
        "generator-3",
        lambda since, beat: standing(beat, since, WaitingFor.DRAINING, held=2) if since < 6 else None,
    )


def slow_tool(fleet: LiveFleet) -> None:
    """N8: one verifier's outside service takes its time."""
    fleet.wait("reward-1", WaitingFor.ENDPOINT, "the judge limits the rate", for_s=8, held=4)


def first_checkpoint(fleet: LiveFleet) -> None:
    """The learner waits for its first checkpoint, longer than for anything before."""
    fleet.wait("learner", WaitingFor.DISK, "the last checkpoint to be written", for_s=30)
    fleet.wait(REWARDS, WaitingFor.INPUT, "its mailbox", for_s=30)
    fleet.wait(GENERATORS, WaitingFor.CREDIT, REFUSAL_WORDS[Refusal.NO_CREDIT], for_s=30)


def long_update(fleet: LiveFleet) -> None:
    """The learner's first update takes minutes and gigabytes, and goes on layer by layer."""

    def change(since: int, beat: Worker) -> Worker:
        still = standing(beat, since, WaitingFor.COMPILE, "update", held=2)
        assert still.vitals is not None
        vitals = msgspec.structs.replace(still.vitals, oldest_age_s=float(since))
        work, grown = WorkReport(steps=still.work.steps + since // 2), (1 << 28) + (6 << 30) * (since > 5)
        return msgspec.structs.replace(still, work=work, rss_bytes=grown, vitals=vitals)

    fleet.change("learner", change)
    fleet.wait(REWARDS, WaitingFor.INPUT, "its mailbox")
    fleet.wait(GENERATORS, WaitingFor.CREDIT, REFUSAL_WORDS[Refusal.NO_CREDIT])


def critic_first(fleet: LiveFleet) -> None:
    """The critic is trained first: the learner claims and drops, and takes no step."""
    fleet.published_stands = True
    fleet.wait("learner", WaitingFor.INPUT, "its critic: explained variance 0.02 of 0.1")


def leaves_before_a_wait(fleet: LiveFleet) -> None:
    """A generator leaves within a second; later all wait for one long response."""
    fleet.change("generator-3", lambda since, beat: None)
    for who, kind, words in (
        (GENERATORS, WaitingFor.CREDIT, REFUSAL_WORDS[Refusal.NO_CREDIT]),
        (REWARDS, WaitingFor.INPUT, "its mailbox"),
        ("learner", WaitingFor.INPUT, "3 of 4 ready"),
    ):
        for name in fleet.of(who) if isinstance(who, Role) else [who]:
            if name != "generator-3":
                fleet.change(
                    name,
                    lambda since, beat, kind=kind, words=words: (
                        beat if since < 20 else standing(beat, since - 20, kind, words)
                    ),
                )


def drain(fleet: LiveFleet) -> None:
    """All workers finish what they hold and leave."""
    for place, name in enumerate(fleet.names):
        fleet.change(
            name,
            lambda since, beat, place=place: (
                standing(beat, since, WaitingFor.DRAINING, held=4) if since < 8 + place else None
            ),
        )


CONTROLS = (
    long_tail, weight_sync, collection, load, evaluation, scale, slow_tool, first_checkpoint,
    critic_first, leaves_before_a_wait, drain,
)  # fmt: skip


@pytest.mark.parametrize("control", CONTROLS, ids=[control.__name__ for control in CONTROLS])
def test_a_healthy_fleet_that_waits_or_changes_is_not_blamed(control: Callable[[LiveFleet], None]) -> None:
    fleet = LiveFleet()
    control(fleet)
    assert fleet.suspected() == []


def test_a_first_update_of_minutes_that_goes_on_layer_by_layer_is_not_blamed() -> None:
    fleet = LiveFleet()
    long_update(fleet)
    assert fleet.suspected(until_s=BREAKS_S + 200) == []


# -- the two engines -------------------------------------------------------------------------------


def test_one_component_is_one_suspicion_with_the_causes_and_both_evidences() -> None:
    stall = Suspicion("reward-0", "stuck", 12.0, "has had work for 8 s", evidence=("4 workers wait for it",))
    odd = [
        Suspicion("reward-0", "hung", 10.0, "no progress for 9 s", role="reward"),
        Suspicion("generator-1", "slow", 9.0, "twice as long"),
        Suspicion("generator-2", "leak", 3.0, "grows by 9 MB/s"),
    ]
    behind = {"generator-1": "reward-0", "generator-2": "reward-0"}
    first, second = joined([stall], odd, lambda name: behind.get(name, ""))
    assert (first.component, first.kind, first.since_s, first.role) == ("reward-0", "stuck", 10.0, "reward")
    assert first.evidence == (
        "4 workers wait for it", "no progress for 9 s", "generator-1 is slow: twice as long",
    )  # fmt: skip
    assert second is odd[2], "a leak follows from no wait"


def test_rows_of_a_moment_name_no_worker_that_has_no_state() -> None:
    fleet, maker = LiveFleet(), RowMaker()
    states, rows = maker.rows(9.3, list(fleet.at(9)), 1)
    there = {row.worker for row in states}
    assert {end for row in rows for end in (row.sender, row.receiver)} <= there


@pytest.mark.parametrize(("update_s", "pause_s"), [(34, 5), (120, 11)])
def test_a_learner_of_long_updates_that_get_on_is_never_blamed(update_s: int, pause_s: int) -> None:
    """A part of every third update takes longer: shorter than twice the longest, or a tenth of it."""
    fleet = LiveFleet()

    def change(since: int, beat: Worker) -> Worker:
        number, at = divmod(since, update_s)
        is_long = number % 3 == 2
        done = [s for s in range(at + 1) if not (is_long and update_s // 2 < s <= update_s // 2 + pause_s)]
        steps = 1000 * number + len(done)
        work = WorkReport(steps=steps, kind="update", slowest_s=0.4, share=at / update_s, elapsed_s=float(at))
        return msgspec.structs.replace(
            with_counts(beat, since),
            progress=4 * BREAKS_S + number,
            work=work,
            moved_at_s=beat.at_s - (at - done[-1]),
            policy_version=BREAKS_S // VERSION_S + number,
        )

    fleet.change("learner", change)
    found = [one for one in fleet.suspected(BREAKS_S + 4 * update_s) if one.component == "learner"]
    assert found == []


def test_a_learner_of_long_updates_may_take_seconds_between_two_of_them() -> None:
    """It computes then, in no task: it reads the batch, writes records, copies weights."""
    fleet, update_s, between_s = LiveFleet(), 60, 7

    def change(since: int, beat: Worker) -> Worker:
        number, at = divmod(since, update_s + between_s)
        is_update = at < update_s
        work = WorkReport(
            steps=1000 * number + min(at, update_s), kind="update" if is_update else "", slowest_s=0.4 if is_update else 0.0,
            share=at / update_s if is_update else 0.0, elapsed_s=float(at) if is_update else 0.0,
        )  # fmt: skip
        return msgspec.structs.replace(
            with_counts(beat, since),
            progress=4 * BREAKS_S + number,
            work=work,
            moved_at_s=beat.at_s - max(0, at - update_s),
            policy_version=BREAKS_S // VERSION_S + number,
        )

    fleet.change("learner", change)
    found = [one for one in fleet.suspected(BREAKS_S + 3 * (update_s + between_s)) if one.component == "learner"]
    assert found == []
