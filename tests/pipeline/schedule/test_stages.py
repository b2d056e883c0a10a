"""Claims about the orders that a learner's stages can have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from pipeline.schedule.blocks import Block, Placement, chain
from pipeline.schedule.plan import make_plan
from pipeline.schedule.play import play
from pipeline.schedule.search import search
from pipeline.schedule.shapes import Costs, shape
from pipeline.schedule.stages import NAMED, stage_orders, stage_ranks
from protocol.errors import ConfigError


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("schedule", [*NAMED, "search"])
def test_each_schedule_has_orders_of_any_number_of_micro_batches(schedule: str, num_ranks: int) -> None:
    found = stage_orders(schedule, num_ranks)
    assert set(found.ranks) == set(range(num_ranks))
    assert stage_ranks(schedule, num_ranks) == found.ranks
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
    assert stage_orders("search", 2, 4).ranks == stage_ranks("search", 2, 4) == [0, 1, 1, 0]
    assert stage_orders("interleaved", 2, 4).ranks == [0, 1, 0, 1]
    assert stage_orders("1f1b", 2).ranks == stage_orders("search", 2, 2).ranks == [0, 1]


@pytest.mark.parametrize(
    ("schedule", "settings", "said"),
    [
        (Path("1b1f"), {}, "is '1b1f', and there is no file 1b1f; expected search, one of gpipe, 1f1b"),
        ("1f1b", {"num_stages": 4}, "1f1b has 2 stages on 2 ranks, but learner.pipeline.stages is 4"),
        ("zb-v", {"num_stages": 2}, "zb-v has 4 stages on 2 ranks, but learner.pipeline.stages is 2"),
        ("zb-h1", {"recomputes": True}, "set model.gradient_checkpointing to false"),
    ],
)
def test_a_schedule_that_does_not_fit_is_refused(schedule: str | Path, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        stage_orders(schedule, 2, **settings)


def written(folder: Path, placement: Placement, memory: int) -> Path:
    """Write what ``headrace schedule --json`` prints."""
    plan = make_plan(search(placement, [memory] * placement.num_devices, unroll=2), 8, None)
    path = folder / "plan.json"
    path.write_bytes(msgspec.json.encode(plan))
    return path


@pytest.mark.parametrize("name", ["V", "wave", "loop"])
@pytest.mark.parametrize("split", [False, True])
def test_a_file_with_a_plan_is_an_order_of_any_number_of_micro_batches(tmp_path: Path, name: str, split: bool) -> None:
    placement = shape(name, 2, Costs(split=split))
    found = stage_orders(written(tmp_path, placement, 3), 2)
    assert found.splits is split and found.words.startswith("order of plan.json, period ")
    assert found.ranks == {"V": [0, 1], "wave": [0, 1, 1, 0], "loop": [0, 1, 0, 1]}[name]
    for num in (1, 5, 12):
        timetable = play(placement, found.orders(num))
        timetable.check([3, 3])
        assert timetable.num_micro_batches == num


def test_a_plan_that_a_learner_cannot_run_is_refused(tmp_path: Path) -> None:
    everywhere = written(tmp_path, shape("M", 2), 4)
    with pytest.raises(ConfigError, match=r"has block 'embed\.f' on 2 devices, which a learner cannot compute"):
        stage_orders(everywhere, 2)
    with pytest.raises(
        ConfigError, match=r"is for 2 devices, but learner\.ranks is 4; .* headrace schedule --devices 4"
    ):
        stage_orders(everywhere, 4)
    inference = written(tmp_path, shape("V", 2, Costs(training=False)), 4)
    with pytest.raises(ConfigError, match="b0, b1 are missing or too many"):
        stage_orders(inference, 2)
    # a backward pass that waits for nothing
    early = chain("early", 2, tuple(Block(name, 1, 0, (int(name[1]),)) for name in ("b0", "f0", "f1", "b1")))
    with pytest.raises(ConfigError, match="the devices wait for one another"):
        stage_orders(written(tmp_path, early, 4), 2)
