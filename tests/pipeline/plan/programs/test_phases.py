"""Claims about the three phases, each by itself."""

from __future__ import annotations

import math
from collections import Counter

import pytest

from pipeline.plan.layouts.boxes import size
from pipeline.plan.layouts.vectors import Kind
from pipeline.plan.programs.actions import Backward, Collective, Drop, Forward, Program, Send, reads
from pipeline.plan.programs.check import check_program
from pipeline.plan.programs.operators import Model, Operator, read_rule
from pipeline.plan.programs.placing import Stage, place
from pipeline.plan.programs.preserve import Zero, preserve
from pipeline.plan.programs.split import Split, shards_of, transform
from pipeline.schedule.baselines import known_orders
from pipeline.schedule.shapes import shape
from pipeline.schedule.timetable import Step
from protocol.errors import ConfigError
from tests.pipeline.plan.programs.plans import ALONE, transformer

LINEAR = Operator("up", "linear", "m k+, k+ n -> m n", ("x", "w"), "y")
MODEL = Model(
    {"x": (6, 4), "w": (4, 8), "y": (6, 8), "loss": ()},
    ("w",),
    ("x",),
    (LINEAR, Operator("loss", "loss", "m+ n^ ->", ("y",), "loss")),
    "loss",
).check()
TENSOR = {"q": "h", "k": "h", "v": "h", "attend": "h", "out": "h", "up": "f", "down": "f", "embed": "v", "head": "v"}


# -- transformation --------------------------------------------------------------------------------


def test_a_shard_reads_and_writes_the_parts_that_its_ranges_name() -> None:
    shards = shards_of(MODEL, LINEAR, Split({"m": 2, "k": 2}))
    assert [shard.box for shard in shards][:2] == [((0, 3), (0, 2), (0, 8)), ((0, 3), (2, 4), (0, 8))]
    rule, box = LINEAR.rule, shards[1].box
    assert rule.part(rule.inputs[1], box) == ((2, 4), (0, 8))
    assert rule.part(rule.output, box) == ((0, 3), (0, 8))
    assert rule.rest(rule.output, box) == ((2, 4),), "the output is this part of a sum"


def test_uneven_parts_copies_and_shards_that_share_a_device() -> None:
    shards = shards_of(MODEL, LINEAR, Split({"m": 4}, copies=2, kept=2))
    assert [shard.box[0] for shard in shards[:4]] == [(0, 1), (1, 3), (3, 4), (4, 6)]
    assert [shard.slot for shard in shards] == [0, 0, 1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize(
    ("split", "said"),
    [
        (Split({"q": 2}), r"cut along 'q'; expected one of k, m, n"),
        (Split({"m": 7}), r"'m' of length 6 is to be cut into 7; expected 1 to 6"),
        (Split({"m": 2}, kept=4), r"1 copies of 2 shards, 4 on each device"),
    ],
)
def test_a_cut_that_is_not_possible_is_refused(split: Split, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        shards_of(MODEL, LINEAR, split)


def test_a_dimension_that_stays_whole_is_not_cut() -> None:
    with pytest.raises(ConfigError, match=r"cut along 'n'; expected one of m"):
        shards_of(MODEL, MODEL.by_name["loss"], Split({"n": 2}))


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        ("m k, k n -> m n", "'k'; expected \\+ or \\^ after what the output does not have"),
        ("m+ k+, k+ n -> m n", "says 'm'; expected letters"),
        ("m+ k+, k+ n -> m+ n", "'m'\\+; expected no \\+ after what the output has"),
        ("m n", "has no ->"),
    ],
)
def test_a_rule_that_makes_no_sense_is_refused(rule: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read_rule(rule)


# -- space and time --------------------------------------------------------------------------------


def test_shards_and_devices_of_a_stage_must_be_equal_in_number() -> None:
    shards = transform(MODEL, {"up": Split({"n": 2})})
    orders = known_orders(ALONE)["GPipe"](1)
    with pytest.raises(ConfigError, match="operator 'loss' is cut for 1 devices, and stage 'f0' has 2"):
        place(MODEL, shards, {"f0": Stage(("up", "loss"), (0, 1))}, ALONE, orders)
    with pytest.raises(ConfigError, match="operator 'loss' is in 0 stages"):
        place(MODEL, shards, {"f0": Stage(("up",), (0, 1))}, ALONE, orders)


def test_orders_in_which_devices_wait_for_one_another_are_refused() -> None:
    two = shape("V", 2)
    orders = [[Step("b0", 0), Step("f0", 0)], [Step("f1", 0), Step("b1", 0)]]
    stages = {"f0": Stage(("up",), (0,)), "f1": Stage(("loss",), (1,))}
    with pytest.raises(ConfigError, match="the devices wait for one another"):
        place(MODEL, transform(MODEL, {}), stages, two, orders)


def test_each_device_follows_its_order() -> None:
    two = shape("V", 2)
    orders = known_orders(two)["1F1B"](4)
    stages = {"f0": Stage(("up",), (0,)), "f1": Stage(("loss",), (1,))}
    program = preserve(place(MODEL, transform(MODEL, {}), stages, two, orders))
    for row, order in zip(program.actions, orders, strict=True):
        passes = [action for action in row if isinstance(action, Forward | Backward)]
        assert [(type(each) is Backward, each.micro_batch) for each in passes] == [
            (step.block[0] == "b", step.micro_batch) for step in order
        ]


# -- dependencies ----------------------------------------------------------------------------------


def on_one_block(model: Model, splits: dict[str, Split], devices: int, zero: Zero = 0) -> Program:
    stages = {"f0": Stage(tuple(model.by_name), tuple(range(devices)))}
    placed = place(model, transform(model, splits), stages, ALONE, known_orders(ALONE)["GPipe"](2))
    program = preserve(placed, zero)
    check_program(model, program)
    return program


def collectives(program: Program, device: int = 0, *, after_backward: bool = False) -> Counter[Kind]:
    row = program.actions[device]
    last = max(place for place, action in enumerate(row) if isinstance(action, Backward))
    part = row[last:] if after_backward else row[:last]
    return Counter(action.kind for action in part if isinstance(action, Collective))


def test_data_parallel_devices_exchange_nothing_but_each_parameters_gradient_once() -> None:
    model = transformer(layers=2)
    program = on_one_block(model, {name: Split({"b": 2}) for name in model.by_name}, 2)
    assert collectives(program) == {}
    assert collectives(program, after_backward=True) == {Kind.ALL_REDUCE: len(model.parameters) + 1}, "and the loss"


@pytest.mark.parametrize(("zero", "gathers", "scatters"), [(1, 1, 1), (2, 1, 2), (3, 4, 2)])
def test_stored_parts_are_gathered_and_reduced_as_often_as_the_stage_of_zero_says(
    zero: Zero, gathers: int, scatters: int
) -> None:
    model = transformer(layers=2)
    program = on_one_block(model, {name: Split({"b": 2}) for name in model.by_name}, 2, zero)
    number = len(model.parameters)
    found = Counter(action.kind for action in program.actions[0] if isinstance(action, Collective))
    # two micro-batches, and the loss
    assert found == {Kind.ALL_GATHER: gathers * number, Kind.REDUCE_SCATTER: scatters * number, Kind.ALL_REDUCE: 1}
    stored = {given.tensor: given.box for given in program.given[0] if given.micro_batch < 0}
    assert all(2 * size(stored[name]) == math.prod(model.shapes[name]) for name in model.parameters)


def test_what_stage_3_gathers_serves_one_pass_and_is_dropped() -> None:
    model = transformer(layers=2)
    (row, _) = on_one_block(model, {name: Split({"b": 2}) for name in model.by_name}, 2, 3).actions
    dropped = {name for action in row if isinstance(action, Drop) for name in action.values}
    gathered = [a.output for a in row if isinstance(a, Collective) and a.kind is Kind.ALL_GATHER]
    for name in gathered:
        passes = {(type(a), a.micro_batch) for a in row if isinstance(a, Forward | Backward) and name in reads(a)}
        assert len(passes) == 1 and name in dropped


def test_tensor_parallel_layers_have_two_sums_forward_and_two_backward() -> None:
    model = transformer(layers=2)
    splits = {
        name: Split({TENSOR[kind]: 2}) if (kind := name.partition(".")[0]) in TENSOR else Split(copies=2)
        for name in model.by_name
    }
    program = on_one_block(model, splits, 2)
    # by micro-batch: four a layer, the embedding's, and that of the head's input; the loss needs all logits
    assert collectives(program) == {Kind.ALL_REDUCE: 2 * (4 * 2 + 2), Kind.ALL_GATHER: 2}
    assert collectives(program, after_backward=True) == {}, "each device has whole gradients of what it has"


def test_a_pipeline_sends_states_once_forward_and_gradients_once_backward() -> None:
    model, two = transformer(layers=2), shape("V", 2)
    first = tuple(name for name in model.by_name if name == "embed" or name.endswith(".0"))
    stages = {"f0": Stage(first, (0,)), "f1": Stage(tuple(name for name in model.by_name if name not in first), (1,))}
    program = preserve(place(model, transform(model, {}), stages, two, known_orders(two)["1F1B"](3)))
    check_program(model, program)
    sends = [[action for action in row if isinstance(action, Send)] for row in program.actions]
    assert [len(row) for row in sends] == [3, 3]


def test_gradients_of_what_two_stages_share_are_summed_at_once() -> None:
    model, two = transformer(layers=2, tied=True), shape("V", 2)
    first = tuple(name for name in model.by_name if name == "embed" or name.endswith(".0"))
    stages = {"f0": Stage(first, (0,)), "f1": Stage(tuple(name for name in model.by_name if name not in first), (1,))}
    program = preserve(place(model, transform(model, {}), stages, two, known_orders(two)["1F1B"](3)))
    check_program(model, program)
    calls = [[a.kind for a in row if isinstance(a, Collective)] for row in program.actions]
    assert calls == [[Kind.ALL_REDUCE]] * 2, "the embedding's and the head's, which are one table"


def test_a_recomputed_stage_passes_forward_twice_and_keeps_once() -> None:
    model = transformer(layers=1)
    stages = {"f0": Stage(tuple(model.by_name), (0,), recompute=True)}
    placed = place(model, transform(model, {}), stages, ALONE, known_orders(ALONE)["GPipe"](2))
    program = preserve(placed)
    check_program(model, program)
    passes = Counter((a.operator, a.keep) for a in program.actions[0] if isinstance(a, Forward))
    assert passes == {(name, keep): 2 for name in model.by_name for keep in (False, True)}
