"""An RL iteration as work that repeats: what staleness buys."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.schedule.iteration import plan_iteration
from pipeline.schedule.search import Proof
from protocol.errors import ConfigError

EXAMPLE = Path(__file__).parents[3] / "configs/schedules/iteration.json"


def test_one_step_of_staleness_takes_the_example_from_50_to_the_work_of_its_generator() -> None:
    plans = plan_iteration(EXAMPLE)
    assert [(plan.staleness, plan.period.value, plan.period.proof) for plan in plans] == [
        (1, 50, Proof.OPTIMAL),
        (2, 33, Proof.OPTIMAL),
    ]
    assert [(plan.bounds.work, plan.bounds.recurrence) for plan in plans] == [(33, 48), (33, 32)]


def test_the_latest_start_is_as_late_as_the_update_allows_and_critics_may_be_a_period_late() -> None:
    plan, *_ = plan_iteration(EXAMPLE)
    starts, latest = ({each.block: each.start for each in of} for of in (plan.starts, plan.latest))
    assert all(latest[block] >= starts[block] for block in starts)
    assert latest["update"] == starts["update"]
    assert latest["learner.b0#3"] == starts["update"] - 4
    assert latest["value#1"] == latest["learner.f0#1"] - 2
    assert latest["critic.b#3"] == starts["critic.b#3"] + 50


def iteration(folder: Path, **changes: Any) -> Path:
    """Two chunks: generation takes 3, learning 2 on another device, then an update of both."""
    blocks = [
        {"name": "generate", "span": 3, "devices": [0]},
        {"name": "learn", "span": 2, "devices": [1]},
        {"name": "update", "span": 1, "devices": [0, 1], "once": True},
    ]
    waits = [
        {"before": "generate", "after": "learn"},
        {"before": "learn", "after": "update"},
        {"before": "update", "after": "generate", "stale": True},
    ]
    path = folder / "small.json"
    path.write_text(json.dumps({"devices": 2, "chunks": 2, "blocks": blocks, "dependencies": waits, **changes}))
    return path


def test_the_update_waits_for_all_chunks_and_all_chunks_for_the_update(tmp_path: Path) -> None:
    first, *_ = plan_iteration(iteration(tmp_path))
    starts = {each.block: each.start for each in first.starts}
    # 3 and 3 of generation, 2 of learning, 1 of the update
    assert first.period.value == 9
    assert starts == {"generate#0": 0, "generate#1": 3, "learn#0": starts["learn#0"], "learn#1": 6, "update": 8}
    assert 3 <= starts["learn#0"] <= 4


def test_queues_have_room_for_what_the_plan_leaves_waiting(tmp_path: Path) -> None:
    *_, last = plan_iteration(iteration(tmp_path))
    assert (last.staleness, last.period.value) == (2, 7)
    (queue,) = last.queues
    assert (queue.before, queue.after) == ("generate", "learn")
    starts = {each.block: each.start for each in last.starts}
    # counted second by second over several iterations
    most = 0
    for at in range(200):
        ended = sum(starts[f"generate#{c}"] + 3 + 7 * m <= at for c in (0, 1) for m in range(40))
        taken = sum(starts[f"learn#{c}"] + 7 * m <= at for c in (0, 1) for m in range(40))
        most = max(most, ended - taken)
    assert queue.chunks == most


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"chunks": 0}, "0 chunks; expected 1 or more"),
        ({"dependencies": []}, "expected one with stale: true"),
        ({"dependencies": [{"before": "a", "after": "learn", "stale": True}]}, "names block 'a'"),
        ({"devices": 1}, r"block 'learn' has devices \[1\]; expected 0 to 0"),
    ],
)
def test_a_wrong_iteration_is_refused(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        plan_iteration(iteration(tmp_path, **changes))
