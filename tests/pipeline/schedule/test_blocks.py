"""Shapes are the placements of the papers, and work that cannot be scheduled is refused with what is wrong."""

from __future__ import annotations

import pytest

from pipeline.schedule.blocks import Block, Dependency, Placement
from pipeline.schedule.shapes import SHAPES, Costs, shape
from protocol.errors import ConfigError

WORK = {
    "V": 4,
    "X": 8,
    "M": 6,
    "NN": 8,
    "NN-eager": 8,
    "MLLM": 8,
    "K": 6,
    "finetune": 4,
    "3F1B": 4,
    "loop": 8,
    "wave": 8,
}


@pytest.mark.parametrize("name", SHAPES)
def test_every_device_of_a_shape_has_the_same_work_and_holds_nothing_after_a_micro_batch(name: str) -> None:
    placement = shape(name, 4)
    for device, places in enumerate(placement.on_device):
        assert placement.work(device) == WORK[name]
        assert sum(placement.blocks[place].memory for place in places) == 0


@pytest.mark.parametrize("name", [name for name in SHAPES if name != "3F1B"])
def test_splitting_the_backward_pass_changes_neither_the_work_nor_what_is_released(name: str) -> None:
    whole, split = shape(name, 4, Costs(memory=2)), shape(name, 4, Costs(memory=2, weights_memory=1, split=True))
    assert len(split.blocks) - len(whole.blocks) == sum(block.name[0] == "w" for block in split.blocks) > 0
    for device in range(4):
        assert split.work(device) == whole.work(device)
        assert sum(split.blocks[place].memory for place in split.on_device[device]) == 0


def test_inference_is_the_forward_pass_and_keeps_nothing() -> None:
    names = [block.name for block in shape("NN", 4, Costs(training=False)).blocks]
    assert names == ["encoder.f", "f0", "f1", "decoder.f", "f2", "f3"]
    assert not any(block.memory for name in SHAPES for block in shape(name, 4, Costs(training=False)).blocks)


def placed(*blocks: Block, waits: tuple[Dependency, ...] = ()) -> Placement:
    return Placement("mine", 2, blocks, waits).check()


A, B = Block("a", 1), Block("b", 1)


@pytest.mark.parametrize(
    ("blocks", "waits", "says"),
    [
        ((A, B), (Dependency("a", "b"), Dependency("b", "a")), r"in a circle: (a -> b -> a|b -> a -> b)"),
        ((Block("a", -3),), (), "block 'a' has span -3; expected 1 or more"),
        ((Block("a", 1, devices=(0, 2)),), (), r"block 'a' has devices \[0, 2\]; expected 0 to 1"),
        ((Block("a", 1, devices=(1, 1)),), (), "expected each once"),
        ((A, A), (), "two blocks are called 'a'"),
        ((A, B), (Dependency("a", "c"),), "names block 'c'; expected one of a, b"),
        ((A, B), (Dependency("a", "b", -1),), "'b' waits for 'a' at distance -1"),
        ((), (), "at least one device and one block"),
    ],
)
def test_work_that_cannot_be_scheduled_is_refused(
    blocks: tuple[Block, ...], waits: tuple[Dependency, ...], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        placed(*blocks, waits=waits)


def test_a_circle_that_goes_to_an_earlier_micro_batch_is_no_circle() -> None:
    placed(A, B, waits=(Dependency("a", "b"), Dependency("b", "a", 1)))


@pytest.mark.parametrize(
    ("name", "devices", "says"),
    [
        ("Y", 4, "no shape 'Y'"),
        ("m", 4, "did you mean M?"),
        ("NN", 3, "expected an even number"),
        ("V", 1, "2 or more"),
    ],
)
def test_a_shape_that_does_not_exist_is_refused(name: str, devices: int, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        shape(name, devices)
