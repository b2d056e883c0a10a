"""The orders that people know are theirs: torch's, where torch has them, and the published makespans."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.pipelining import schedules

from pipeline.schedule.baselines import known_orders, measured_period
from pipeline.schedule.plan import least_makespan
from pipeline.schedule.play import play
from pipeline.schedule.shapes import SHAPES, Costs, shape
from pipeline.schedule.timetable import Step
from protocol.errors import ConfigError

SPLIT = Costs(split=True, memory=2, weights_memory=1)
KIND = {"FORWARD": "f", "BACKWARD_INPUT": "i", "BACKWARD_WEIGHT": "w", "FULL_BACKWARD": "b"}


def steps_of(actions: list[Any], is_split: bool) -> list[Step]:
    """Return torch's actions of a device as steps; what it overlaps one after the other."""
    steps = list[Step]()
    for action in actions:
        for each in (action.sub_actions or (action,)) if action else ():
            kind = KIND.get(each.computation_type.name)
            kinds = "iw" if kind == "b" and is_split else kind or ""
            steps += [Step(f"{one}{each.stage_index}", each.microbatch_index) for one in kinds]
    return steps


@pytest.mark.parametrize("num_devices", [2, 4, 5])
@pytest.mark.parametrize(
    ("shape_name", "name", "theirs", "per_device"),
    [
        ("V", "GPipe", schedules.ScheduleGPipe, 1),
        ("V", "1F1B", schedules.Schedule1F1B, 1),
        ("V", "ZB-H1", schedules.ScheduleInterleavedZeroBubble, 1),
        ("loop", "interleaved 1F1B", schedules.ScheduleInterleaved1F1B, 2),
        ("wave", "ZB-V", schedules.ScheduleZBVZeroBubble, 2),
        ("wave", "DualPipeV", schedules.ScheduleDualPipeV, 2),
    ],
)
def test_an_order_is_torchs(num_devices: int, shape_name: str, name: str, theirs: Any, per_device: int) -> None:
    is_split = name in ("ZB-H1", "ZB-V", "DualPipeV")
    placement = shape(shape_name, num_devices, SPLIT if is_split else None)
    for num in (2 * num_devices, 4 * num_devices):
        rounds = max(1, num // num_devices)
        made = SimpleNamespace(
            pp_group_size=num_devices, _n_microbatches=num, _num_stages=per_device * num_devices,
            num_stages=per_device * num_devices, n_local_stages=per_device, microbatches_per_round=num // rounds,
        )  # fmt: skip
        orders = known_orders(placement)[name](num)
        whole = theirs._get_pipeline_order(made) if per_device == 1 and not is_split else None
        # torch's table of 1F1B begins with micro-batch 1 on the last device; what it runs does not
        for device, order in enumerate(orders[:-1] if name == "1F1B" else orders):
            actions = whole[device] if whole else theirs._calculate_single_rank_operations(made, device)
            assert list(order) == steps_of(actions, is_split)


@pytest.mark.parametrize("name", SHAPES)
def test_every_known_order_of_a_shape_runs_and_passes_the_judge(name: str) -> None:
    split = [] if name == "3F1B" else [shape(name, 4, SPLIT)]
    for placement in [shape(name, 4), shape(name, 4, Costs(training=False)), *split]:
        for order in known_orders(placement).values():
            play(placement, order(8)).check()


@pytest.mark.parametrize(
    ("name", "order", "makespan", "period"),
    [
        ("V", "1F1B", 524, 4), ("V", "GPipe", 524, 4), ("M", "1F1B+", 1034, 8), ("NN", "1F1B+", 1290, 10),
        ("MLLM", "1F1B+", 1290, 10), ("K", "staged 1F1B", 1280, 10), ("K", "1F1B+", 1026, 8),
    ],
)  # fmt: skip
def test_128_micro_batches_take_as_long_as_is_known(name: str, order: str, makespan: int, period: int) -> None:
    placement = shape(name, 4)
    known = known_orders(placement)[order]
    assert play(placement, known(128)).makespan == makespan
    assert measured_period(placement, known) == period


@pytest.mark.parametrize(("name", "bound"), [("V", 524), ("X", 1028), ("M", 768), ("NN", 1024), ("K", 772)])
def test_no_known_order_beats_the_least_makespan(name: str, bound: int) -> None:
    placement = shape(name, 4)
    assert least_makespan(placement, 128) == bound
    assert all(play(placement, order(128)).makespan >= bound for order in known_orders(placement).values())


def test_1f1b_holds_as_many_micro_batches_as_stages_follow() -> None:
    placement = shape("V", 4)
    assert play(placement, known_orders(placement)["1F1B"](20)).peaks == (4, 3, 2, 1)
    placement = shape("V", 4, SPLIT)
    assert play(placement, known_orders(placement)["ZB-H1"](20)).peaks == (8, 7, 6, 5)


def test_a_round_trip_of_chimera_has_no_bubble_if_both_passes_take_as_long() -> None:
    placement = shape("X", 4, Costs(backward=1))
    assert measured_period(placement, known_orders(placement)["Chimera direct"]) == 4


def test_round_trips_of_chimera_one_after_the_other_take_as_long_as_is_known() -> None:
    placement = shape("X", 4)
    known = known_orders(placement)
    assert play(placement, known["Chimera in units"](64)).makespan == 704
    assert play(placement, known["Chimera direct"](64)).makespan == 642


def test_an_order_that_cannot_do_a_number_of_micro_batches_says_which_it_can() -> None:
    with pytest.raises(ConfigError, match="DualPipeV with 7 micro-batches; expected at least 8"):
        known_orders(shape("wave", 4, SPLIT))["DualPipeV"](7)
    with pytest.raises(ConfigError, match="with 9 micro-batches; expected a multiple of 2"):
        known_orders(shape("loop", 4))["interleaved 1F1B"](9)
