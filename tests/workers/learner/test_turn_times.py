"""Every second of the learner's loop is in one part of one row."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path

import pytest
from msgspec.structs import replace

import tests.workers.dying
from pipeline.observability.history import UPDATE_PARTS
from pipeline.runtime.clock import RealClock
from tests.manual_clock import ManualClock
from tests.pipeline.observability.rows import update_row
from tests.workers.dying import BATCH, Reaper, World
from workers.learner.policy_update import Stepped
from workers.learner.turn_times import TurnTimes


class TickingClock(RealClock):
    """Whoever asks for the time takes some: each moment of the learner's is another."""

    def __init__(self) -> None:
        self._now_s, self._random = 1000.0, random.Random(3)

    def monotonic(self) -> float:
        # exact in binary, so that sums are
        self._now_s += self._random.randrange(1, 64) / 64
        return self._now_s

    def time(self) -> float:
        return self._now_s


@pytest.mark.parametrize("every", [{}, {"num_evaluation_prompts": 2, "evaluation": {"keep_best": True}}], ids=str)
async def test_the_parts_of_each_row_add_up_to_the_time_since_the_row_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: dict[str, object]
) -> None:
    monkeypatch.setattr(tests.workers.dying, "RealClock", TickingClock)
    world = World(tmp_path, monkeypatch, num_updates=6, **every)  # pyright: ignore[reportArgumentType]
    assert await world.live(Reaper(None))
    rows = world.rows()
    assert len(rows) == 6
    for before, row in pairwise(rows):
        assert row.seconds == row.at_s - before.at_s
        assert min(getattr(row, part) for part in UPDATE_PARTS) >= 0.0
        for part in ("wait_s", "prepare_s", "step_s", "record_s", "publish_s", "save_s"):
            assert getattr(row, part) > 0.0, part


async def test_an_update_that_is_given_up_counts_for_the_next_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tests.workers.dying, "RealClock", TickingClock)
    world = World(tmp_path, monkeypatch, num_updates=3, learner={"max_bad_steps": 9})
    refused = set[str]()

    def is_bad(names: list[str]) -> bool:
        if len(world.stepped) == BATCH and not refused:
            refused.update(names)
        return not refused.isdisjoint(names)

    world.is_bad = is_bad
    assert await world.live(Reaper(None))
    assert [type(row).__name__ for row in world.history()].count("RefusedRow") == 1
    assert [row.seconds for row in world.rows()[1:]] == [b.at_s - a.at_s for a, b in pairwise(world.rows())]


async def test_what_a_step_waited_for_counts_for_that_part_and_the_rest_is_other() -> None:
    clock = ManualClock()
    times = TurnTimes(clock)
    for part, seconds in (("wait_s", 2.0), ("prepare_s", 0.5), ("wait_s", 1.0)):
        with times.part(part):
            await clock.advance(seconds)
    await clock.advance(9.25)
    times.add_steps(Stepped([], 1.0, 8.0), save_s=3.0)
    row = replace(update_row(1), publish_s=0.0, **times.cut())
    assert (row.wait_s, row.prepare_s, row.logprob_s, row.step_s, row.save_s, row.other_s) == (3, 0.5, 1, 5, 3, 0.25)
    assert row.seconds == 12.75 and row.compute_s == 6.0
    await clock.advance(1.5)
    assert times.cut() == {"other_s": 1.5, "at_s": clock.time()}
