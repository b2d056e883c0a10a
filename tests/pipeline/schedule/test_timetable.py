"""The judges: a timetable that breaks a rule is refused, and orders are played as devices would run them."""

from __future__ import annotations

import random

import pytest

from pipeline.schedule.blocks import Block, Dependency, Placement
from pipeline.schedule.play import play
from pipeline.schedule.repetend import Repetend, unrolled
from pipeline.schedule.shapes import shape
from pipeline.schedule.timetable import Step, Timetable
from protocol.errors import ConfigError

V = shape("V", 2)
GOOD = {
    Step("f0", 0): 0, Step("f1", 0): 1, Step("b1", 0): 2, Step("b0", 0): 5,
    Step("f0", 1): 1, Step("f1", 1): 5, Step("b1", 1): 6, Step("b0", 1): 9,
}  # fmt: skip


def moved(step: Step, start: int) -> Timetable:
    return Timetable(V, 2, {**GOOD, step: start})


def test_a_good_timetable_is_measured() -> None:
    timetable = Timetable(V, 2, GOOD)
    timetable.check([2, 1])
    assert (timetable.makespan, timetable.bubble, timetable.peaks) == (12, 1 - 16 / 24, (2, 1))
    assert timetable.orders[1] == (Step("f1", 0), Step("b1", 0), Step("f1", 1), Step("b1", 1))


@pytest.mark.parametrize(
    ("timetable", "memory", "says"),
    [
        (moved(Step("b0", 1), 8), None, r"starts at 8, before .*'b1', micro_batch=1\) ends at 9"),
        (moved(Step("f0", 1), 0), None, "device 0 runs .* at once at 0"),
        (moved(Step("f1", 1), 4), None, "device 1 runs .* at once at 4"),
        (Timetable(V, 2, GOOD), [1, 1], "device 0 holds 2 at .* expected at most 1"),
        (Timetable(V, 1, GOOD), None, "not of this placement"),
        (Timetable(V, 3, GOOD), None, "missing"),
    ],
)
def test_a_timetable_that_breaks_a_rule_is_refused(timetable: Timetable, memory: list[int] | None, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        timetable.check(memory)


def test_a_wait_for_an_earlier_micro_batch_is_checked() -> None:
    loop = Placement("loop", 2, V.blocks, (*V.dependencies, Dependency("b0", "f0", 1)))
    with pytest.raises(
        ConfigError, match=r"'f0', micro_batch=1\) starts at 1, before .*'b0', micro_batch=0\) ends at 8"
    ):
        Timetable(loop, 2, GOOD).check()


def test_no_single_change_of_a_start_goes_unnoticed_where_it_breaks_a_rule() -> None:
    """Compares the judge with a count of who runs when, second by second."""
    rng = random.Random(1)
    agreed = 0
    for _ in range(400):
        step = rng.choice(sorted(GOOD))
        timetable = moved(step, rng.randrange(12))
        busy = [
            (device, at)
            for one in timetable.starts
            for device in timetable.block(one).devices
            for at in range(timetable.starts[one], timetable.end(one))
        ]
        waits = all(
            timetable.end(Step(each.before, m)) <= timetable.starts[Step(each.after, m)]
            for each in V.dependencies
            for m in range(2)
        )
        is_good = len(busy) == len(set(busy)) and waits
        try:
            timetable.check()
        except ConfigError:
            assert not is_good
        else:
            assert is_good
            agreed += 1
    assert 20 < agreed < 380


# -- playing orders --------------------------------------------------------------------------------


def test_each_step_starts_as_soon_as_its_devices_and_what_it_waits_for_allow() -> None:
    timetable = play(V, Timetable(V, 2, GOOD).orders)
    assert timetable.starts == GOOD
    timetable.check([2, 1])


def test_a_block_of_all_devices_starts_when_the_last_of_them_is_there() -> None:
    both = Placement("both", 2, (Block("a", 3, devices=(0,)), Block("all", 1, devices=(0, 1))))
    assert play(both, [[Step("a", 0), Step("all", 0)], [Step("all", 0)]]).starts[Step("all", 0)] == 3


def test_orders_in_which_devices_wait_for_one_another_are_refused() -> None:
    orders = [[Step("b0", 0), Step("f0", 0)], [Step("f1", 0), Step("b1", 0)]]
    with pytest.raises(ConfigError, match=r"wait for one another: device 0 at .*'b0'.*, device 1 at .*'f1'"):
        play(V, orders)


# -- repetitions -----------------------------------------------------------------------------------


def test_unrolled_micro_batches_pass_each_block_in_order_and_keep_their_waits() -> None:
    loop = Placement("loop", 2, V.blocks, (*V.dependencies, Dependency("b0", "f0", 3)))
    waits = {(each.before, each.after): each.distance for each in unrolled(loop, 2).dependencies}
    assert waits["f0#0", "f1#0"] == waits["f0#1", "f1#1"] == waits["f0#0", "f0#1"] == 0
    assert waits["f0#1", "f0#0"] == 1
    assert (waits["b0#1", "f0#0"], waits["b0#0", "f0#1"]) == (2, 1)


def test_a_repetition_gives_a_timetable_of_any_number_of_micro_batches() -> None:
    # the second micro-batch starts one later, and both repeat every 16
    starts = {**GOOD}
    repetend = Repetend(V, 2, 12, starts)
    assert repetend.latency == 12
    for num in (1, 2, 3, 7):
        timetable = repetend.timetable(num)
        timetable.check([2, 1])
        assert timetable.num_micro_batches == num
        assert timetable.makespan <= 12 * -(-num // 2)
