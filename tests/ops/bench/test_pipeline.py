"""Claims about the benchmark of found orders: its programs are the orders."""

from __future__ import annotations

import pytest

from ops.bench.pipeline import SHAPES, found, program_of
from pipeline.plan.programs.actions import Backward, Forward
from pipeline.plan.programs.placing import backward_of
from pipeline.schedule.timetable import Step


@pytest.mark.parametrize("name", SHAPES)
def test_each_device_computes_the_blocks_of_its_order(name: str) -> None:
    repetend = found(name)
    orders = repetend.timetable(5).orders
    _, program = program_of(repetend.placement, orders)
    for row, order in zip(program.actions, orders, strict=True):
        passes = [
            Step(backward_of(each.operator) if isinstance(each, Backward) else each.operator, each.micro_batch)
            for each in row
            if isinstance(each, Forward | Backward)
        ]
        assert passes == list(order)
