"""Claims about the sentence on what limits a run: it follows the waits to their end."""

from __future__ import annotations

import pytest

from pipeline.fleet.flow.bottleneck import bottleneck, graph_of
from pipeline.fleet.health import HealthKind
from pipeline.process.work import WorkReport
from pipeline.runtime.registry.contract import WaitingFor
from tests.pipeline.fleet.test_status import NOW, beat, rows


def test_the_bottleneck_is_the_worker_at_the_end_of_the_waits():
    workers = rows(
        beat("learner-0", WaitingFor.INPUT),
        beat("generator-0", WaitingFor.ROOM, detail="reward-0 to read"),
        beat("generator-1", WaitingFor.CREDIT),
        beat("reward-0", WaitingFor.COMPUTE, detail="16 responses"),
    )
    assert bottleneck(workers) == "learner-0 waits for reward-0, which is at compute: 16 responses"


def test_a_wait_that_names_a_worker_leads_to_it_and_not_to_another_of_its_role():
    workers = rows(
        beat("learner-0", WaitingFor.WEIGHTS, detail="generator-1 (version 3) to take version 4"),
        beat("generator-0", WaitingFor.COMPUTE, still_s=50.0),
        beat("generator-1", WaitingFor.ROOM, detail="reward-0 to read"),
        beat("reward-0", WaitingFor.COMPUTE, still_s=1.0),
        beat("reward-1", WaitingFor.COMPUTE, still_s=40.0),
    )
    assert bottleneck(workers) == "learner-0 waits for generator-1 waits for reward-0, which is at compute"


def test_of_two_ways_to_the_end_of_the_waits_the_shorter_is_told():
    workers = rows(
        beat(
            "learner-0", WaitingFor.WEIGHTS, detail="generator-0 (version 3), generator-1 (version 3) to take version 4"
        ),
        beat("generator-0", WaitingFor.COMPUTE),
        beat("generator-1", WaitingFor.ROOM, detail="reward-0 to read"),
        beat("reward-0", WaitingFor.INPUT),
    )
    assert bottleneck(workers) == "learner-0 waits for generator-0, which is at compute"


def test_of_workers_at_work_the_one_longest_still_is_named():
    workers = rows(
        beat("learner-0", WaitingFor.INPUT),
        *(beat(f"generator-{n}", WaitingFor.COMPUTE, still_s=still_s) for n, still_s in enumerate((2.0, 30.0, 9.0))),
        beat("reward-0", WaitingFor.INPUT, still_s=90.0),
    )
    assert bottleneck(workers) == "learner-0 waits for generator-1, which is at compute"


def test_a_run_that_no_generator_has_joined_yet_is_shown_as_such():
    workers = rows(beat("learner-0", WaitingFor.INPUT), beat("reward-0", WaitingFor.INPUT, detail="its mailbox"))
    told = "learner-0 waits for reward-0, which is at input: its mailbox; no generator has a heartbeat"
    assert bottleneck(workers) == told


def test_a_judge_that_is_down_is_what_everything_waits_for():
    workers = rows(
        beat("learner-0", WaitingFor.INPUT),
        beat("generator-0", WaitingFor.CREDIT, still_s=9.0),
        beat("reference-0", WaitingFor.COMPUTE),
        beat("reward-0", WaitingFor.ENDPOINT, detail="endpoint quality, which does not answer"),
    )
    told = "learner-0 waits for reward-0, which is at endpoint: endpoint quality, which does not answer"
    assert bottleneck(workers) == told


def test_a_worker_that_does_not_reach_a_mailbox_waits_for_the_network_alone():
    words = "reward-0 at tcp://10.0.0.9:5000 for 12 s"
    workers = rows(
        beat("learner-0", WaitingFor.INPUT),
        beat("generator-0", WaitingFor.ROOM, detail=f"{words}; others do its work", unreached=words, still_s=5.0),
        beat("reward-0", WaitingFor.INPUT, still_s=90.0),
    )
    assert bottleneck(workers) == f"learner-0 waits for generator-0, which is at room: {words}; others do its work"


def test_waits_that_form_a_ring_are_named_and_do_not_hang():
    workers = rows(beat("learner-0", WaitingFor.INPUT), beat("generator-0", WaitingFor.CREDIT))
    assert bottleneck(workers) == "learner-0 waits for generator-0, which is at credit"


@pytest.mark.parametrize(
    ("at", "told"),
    [
        (WaitingFor.COMPUTE, "learner-0 is at compute"),
        (WaitingFor.LEDGER, "learner-0 is at ledger"),
        (WaitingFor.STARTING, "learner-0 is at starting"),
    ],
)
def test_a_learner_that_waits_for_no_worker_is_the_bottleneck_itself(at: WaitingFor, told: str):
    workers = rows(beat("learner-0", at), beat("generator-0", WaitingFor.COMPUTE, still_s=50.0))
    assert bottleneck(workers) == told


def test_a_worker_that_is_stuck_or_silent_comes_first_and_the_observer_never():
    (stuck,) = rows(beat("learner-0", WaitingFor.COMPUTE, still_s=61.0))
    assert bottleneck([stuck]) == "learner-0 is stuck for 61 s (compute)"
    workers = rows(beat("learner-0", WaitingFor.INPUT), beat("observer-0", WaitingFor.COMPUTE, silent_s=30.0))
    assert workers[1].health is HealthKind.SILENT
    assert bottleneck(workers) == "learner-0 is at input; no generator has a heartbeat"


def test_long_work_at_the_end_of_the_waits_is_told_with_its_estimated_end():
    work = WorkReport(steps=9, kind="update", share=0.25, amount=2400.0, unit="tokens", elapsed_s=100.0)
    (row,) = rows(beat("learner-0", WaitingFor.COMPILE, work=work))
    assert bottleneck([row]) == "learner-0 is at compile: update 25 %, 6.0 tokens/s, 5:00 left"


def test_no_worker_is_said_to_be_none():
    assert bottleneck([]) == "no worker has a heartbeat"


def test_a_moments_graph_grows_with_the_fleet_and_not_with_its_square():
    fleet = [("generator", 150, WaitingFor.CREDIT), ("reward", 48, WaitingFor.INPUT), ("learner", 1, WaitingFor.INPUT)]
    workers = rows(*(beat(f"{role}-{n}", at, at_s=NOW) for role, count, at in fleet for n in range(count)))
    assert sum(map(len, graph_of(workers).values())) < 4 * len(workers)
