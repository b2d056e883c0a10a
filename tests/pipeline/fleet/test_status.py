"""Views of the fleet, and its metrics."""

from __future__ import annotations

import pytest

from pipeline.fleet.health import HealthKind
from pipeline.fleet.limits import Limits
from pipeline.fleet.state import Worker, read_once
from pipeline.fleet.status import clock_words, doing, queue_rows, role_rows, worker_rows
from pipeline.ledger.types import QueueStat
from pipeline.observability.metrics import LearnerWaits
from pipeline.process.work import WorkReport
from pipeline.runtime.registry.contract import LinkReport, WaitingFor
from protocol.ids import Incarnation, Role

NOW = 1_000.0


def beat(worker: str, waiting_for: WaitingFor, *, at_s: float = NOW, still_s: float = 0.0, **more: object) -> Worker:
    who = Incarnation(role=Role(worker.rpartition("-")[0]), worker=worker, epoch=1)
    fields = {"pid": 1, "host": "h", "started_s": 0.0, "progress": 5, "progress_at_s": at_s - still_s, **more}
    fields.setdefault("still_s", still_s)
    return Worker(who=who, at_s=at_s, waiting_for=waiting_for, **fields)  # type: ignore[arg-type]


def rows(*beats: Worker):
    return worker_rows(read_once(beats, Limits(60.0, 100.0)))


def test_workers_are_listed_by_role_then_in_the_order_people_count():
    names = ["reward-0", "generator-10", "generator-2", "learner-0"]
    listed = rows(*(beat(name, WaitingFor.INPUT) for name in names))
    assert [row.worker for row in listed] == ["learner-0", "generator-2", "generator-10", "reward-0"]


def test_a_beating_thread_does_not_hide_a_dead_loop():
    (row,) = rows(beat("learner-0", WaitingFor.COMPUTE, still_s=61.0))
    assert row.health is HealthKind.STUCK


def test_long_work_tells_its_share_its_rate_and_its_estimated_end():
    work = WorkReport(steps=9, kind="update", share=0.25, amount=2400.0, unit="tokens", elapsed_s=100.0)
    (row,) = rows(beat("learner-0", WaitingFor.COMPILE, work=work))
    assert doing(row) == "compile: update 25 %, 6.0 tokens/s, 5:00 left"
    assert row.work is not None
    assert (row.work.share, row.work.remaining_s, row.work.per_s) == (0.25, 300.0, 6.0)
    (quick,) = rows(beat("learner-0", WaitingFor.COMPUTE, work=WorkReport(kind="update", share=0.25, elapsed_s=1.0)))
    assert quick.work is None, "what takes a moment is not worth a word"
    (begun,) = rows(beat("learner-0", WaitingFor.COMPUTE, work=WorkReport(kind="update", share=0.01, elapsed_s=9.0)))
    assert begun.work is not None and begun.work.remaining_s is None, "too early to tell"


def test_a_worker_whose_pieces_end_or_that_has_just_begun_is_shown_as_well():
    (row,) = rows(beat("learner-0", WaitingFor.COMPUTE, progress_at_s=NOW - 500.0, moved_at_s=NOW - 3.0, still_s=3.0))
    assert (row.health, row.since_progress_s) == (HealthKind.LIVE, 3.0)
    slow = WorkReport(steps=2, slowest_s=50.0)
    beats = [beat("learner-0", WaitingFor.COMPUTE, still_s=200.0, work=slow)]
    assert worker_rows(read_once(beats, Limits(None, 100.0)))[0].health is HealthKind.LIVE
    assert worker_rows(read_once(beats, Limits(100.0, 100.0)))[0].health is HealthKind.STUCK


def test_waiting_long_is_not_being_stuck():
    assert rows(beat("learner-0", WaitingFor.INPUT, still_s=3_600.0))[0].health is HealthKind.LIVE


def test_a_loop_that_does_not_turn_is_stuck_but_a_checkpoint_takes_its_time():
    assert rows(beat("reward-0", WaitingFor.INPUT, turns=3, turned_at_s=NOW - 61.0))[0].health is HealthKind.NOT_TURNING
    assert rows(beat("reward-0", WaitingFor.DISK, turns=3, turned_at_s=NOW - 61.0))[0].health is HealthKind.LIVE


def test_a_worker_without_heartbeats_is_silent_and_not_counted_as_there():
    workers = rows(beat("generator-0", WaitingFor.COMPUTE), beat("generator-1", WaitingFor.COMPUTE, silent_s=30.0))
    assert [row.health for row in workers] == [HealthKind.LIVE, HealthKind.SILENT]
    (role, missing) = role_rows(workers, {Role.GENERATOR: 2, Role.REWARD: 1})
    assert (role.role, role.num_live, role.num_wanted) == (Role.GENERATOR, 1, 2)
    assert (missing.role, missing.num_live, missing.num_wanted) == (Role.REWARD, 0, 1)


@pytest.mark.parametrize("ahead_s", [-60.0, 60.0])
def test_a_worker_whose_clock_differs_is_as_live_and_as_old_as_any_other(ahead_s: float):
    there = {"at_s": NOW + ahead_s, "started_s": NOW + ahead_s - 30.0, "clock_ahead_s": ahead_s, "silent_s": 0.5}
    (row,) = rows(beat("reward-0", WaitingFor.INPUT, **there))
    assert (row.health, row.since_heartbeat_s, row.uptime_s) == (HealthKind.LIVE, 0.5, 30.5)


def test_status_names_the_worker_and_the_host_whose_clock_differs():
    assert clock_words(rows(beat("reward-0", WaitingFor.INPUT, clock_ahead_s=4.0))) == ""
    far = [beat(f"generator-{n}", WaitingFor.INPUT, host="far", clock_ahead_s=61.0) for n in range(2)]
    late = [beat(f"reward-{n}", WaitingFor.INPUT, host=f"late-{n}", clock_ahead_s=-7.2) for n in range(4)]
    words = clock_words(rows(*far, *late))
    assert "generator-0 and 1 more on far by 61 s ahead; reward-0 on late-0 by 7 s behind" in words
    assert words.endswith(
        "and 1 more hosts. Work is not affected; times in logs and histories are. Set these clocks (NTP)"
    )


def test_a_link_holds_what_was_sent_and_not_received():
    generator = beat(
        "generator-0", WaitingFor.ROOM, links=(LinkReport(name="generator-0>reward-0", sent=12, refused=2),)
    )
    reward = beat("reward-0", WaitingFor.INPUT, links=(LinkReport(name="generator-0>reward-0", received=9, gaps=1),))
    ledger, link = queue_rows([generator, reward], [QueueStat("ready", 3, 64, 1.5, "learner")])
    assert (ledger.kind, ledger.depth, ledger.limit, ledger.oldest_age_s) == ("ledger", 3, 64, 1.5)
    assert (link.kind, link.name, link.depth, link.waiting_for) == ("link", "generator-0>reward-0", 3, "reward-0")
    assert (link.num_refused, link.num_gaps) == (2, 1)


def test_a_link_whose_sender_began_anew_holds_nothing_rather_than_less():
    reward = beat("reward-0", WaitingFor.INPUT, links=(LinkReport(name="generator-0>reward-0", received=9),))
    assert queue_rows([reward], [])[0].depth == 0


def test_the_share_of_the_learners_waits_follows_its_recent_time():
    waits = LearnerWaits()
    assert waits.observe([], 0.0) == 0.0
    for second in range(1, 301):
        waits.observe([beat("learner-0", WaitingFor.INPUT)], float(second))
    assert waits.share > 0.99
    for second in range(301, 343):
        waits.observe([beat("learner-0", WaitingFor.COMPUTE)], float(second))
    assert 0.48 < waits.share < 0.52
    waits.observe([], 400.0)
    assert 0.48 < waits.observe([beat("learner-0", WaitingFor.COMPUTE)], 5000.0) < 0.52, (
        "an absent learner says nothing"
    )
