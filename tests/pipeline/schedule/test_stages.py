"""Claims about the orders that a learner's stages can have."""

from __future__ import annotations

from typing import Any

import pytest

from pipeline.schedule.play import play
from pipeline.schedule.stages import NAMED, stage_orders
from protocol.errors import ConfigError


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("schedule", [*NAMED, "search"])
def test_each_schedule_has_orders_of_any_number_of_micro_batches(schedule: str, num_ranks: int) -> None:
    found = stage_orders(schedule, num_ranks)
    assert set(found.ranks) == set(range(num_ranks))
    for wanted in (1, 2, num_ranks + 1, 4 * num_ranks):
        orders = found.orders(wanted)
        num = 1 + max(step.micro_batch for step in orders[0])
        assert wanted <= num <= wanted + 2 * num_ranks
        timetable = play(found.placement, orders)
        timetable.check()
        last = max(found.ranks[-1:])
        forward = [step.micro_batch for step in orders[last] if step.block == f"f{len(found.ranks) - 1}"]
        assert forward == sorted(forward), "as torch's runtime wants it"


def test_a_search_keeps_to_its_memory_and_does_no_worse_than_1f1b_with_as_much() -> None:
    known, found = stage_orders("1f1b", 4), stage_orders("search", 4)
    makespans = [play(each.placement, each.orders(16)) for each in (found, known)]
    assert makespans[0].makespan <= makespans[1].makespan
    assert max(makespans[0].peaks) <= max(makespans[1].peaks) == 4
    less = stage_orders("search", 4, memory=2)
    assert max(play(less.placement, less.orders(16)).peaks) == 2


def test_two_stages_a_rank_go_there_and_back() -> None:
    assert stage_orders("search", 2, 4).ranks == [0, 1, 1, 0]
    assert stage_orders("interleaved", 2, 4).ranks == [0, 1, 0, 1]
    assert stage_orders("1f1b", 2).ranks == stage_orders("search", 2, 2).ranks == [0, 1]


@pytest.mark.parametrize(
    ("schedule", "settings", "said"),
    [
        ("1b1f", {}, "is '1b1f'; expected search or one of gpipe, 1f1b"),
        ("1f1b", {"num_stages": 4}, "1f1b has 2 stages on 2 ranks, but learner.pipeline.stages is 4"),
        ("zb-v", {"num_stages": 2}, "zb-v has 4 stages on 2 ranks, but learner.pipeline.stages is 2"),
        ("zb-h1", {"recomputes": True}, "set model.gradient_checkpointing to false"),
    ],
)
def test_a_schedule_that_does_not_fit_is_refused(schedule: str, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        stage_orders(schedule, 2, **settings)
