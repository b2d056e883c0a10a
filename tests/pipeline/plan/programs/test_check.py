"""Claims about the checker: it finds faults of any kind before anything runs, and refuses no program that is right."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from pipeline.plan.programs.actions import Action, Add, Cut, Drop, Join, Program
from pipeline.plan.programs.check import check_program
from pipeline.plan.programs.placing import Stage, place
from pipeline.plan.programs.preserve import preserve
from pipeline.plan.programs.split import Split, transform
from pipeline.schedule.baselines import known_orders
from protocol.errors import ConfigError
from tests.pipeline.plan.programs.faults import FAULTS, planted
from tests.pipeline.plan.programs.plans import ALONE, Drawn, draw
from tests.pipeline.plan.programs.test_phases import MODEL


def plan(seed: int) -> Drawn:
    rng = random.Random(seed)
    return draw(rng, rng.choice([2, 4]))


def check_all(seeds: range) -> None:
    for seed in seeds:
        drawn = plan(seed)
        check_program(drawn.model, drawn.program)


def test_legal_plans_are_not_refused() -> None:
    check_all(range(8))


@pytest.mark.long
@pytest.mark.timeout(600)
def test_two_hundred_legal_plans_are_not_refused() -> None:
    check_all(range(200))


SAID = {"missing send": "wait for one another forever", "order with a cycle": "wait for one another forever"}
"""By kind, what is said of it in any plan."""


def find_all(seeds: range, number: int) -> None:
    """Plant each kind of fault in so many plans."""
    rng = random.Random(0)
    found = dict.fromkeys(FAULTS, 0)
    for seed in seeds:
        drawn = plan(seed)
        for name, fault in FAULTS.items():
            wrong = planted(drawn.program, fault, rng) if found[name] < number else None
            if wrong is not None:
                with pytest.raises(ConfigError, match=SAID.get(name, "device")):
                    check_program(drawn.model, wrong)
                    pytest.fail(f"{name} in plan {seed}, {drawn.words}, was not found")
                found[name] += 1
    assert set(found.values()) == {number}, found


def test_every_kind_of_planted_fault_is_found() -> None:
    find_all(range(100, 107), 1)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_every_kind_of_planted_fault_is_found_in_many_plans() -> None:
    find_all(range(200), 10)


def edited(change: dict[type, list[Action]]) -> Program:
    """A linear operator whose sum is in two parts on one device, with the first action of some kinds replaced."""
    splits = {"up": Split({"k": 2}, kept=2), "loss": Split()}
    stages = {"f0": Stage(("up", "loss"), (0,))}
    orders = known_orders(ALONE)["GPipe"](1)
    program = preserve(place(MODEL, transform(MODEL, splits), stages, ALONE, orders))
    check_program(MODEL, program)
    row: list[Action] = [action for action in program.actions[0] if not isinstance(action, Drop)]
    for kind, actions in change.items():
        at = next(place for place, action in enumerate(row) if isinstance(action, kind))
        row[at : at + 1] = actions
    return replace(program, actions=(tuple(row),))


def first(kind: type, program: Program) -> Any:
    return next(action for action in program.actions[0] if isinstance(action, kind))


def test_sums_of_different_rows_are_found_though_they_would_fit() -> None:
    add = first(Add, edited({}))
    halves = [((0, 3), (0, 8)), ((3, 6), (0, 8))]
    cuts: list[Action] = [Cut(name, box, f"{name}{n}") for name in add.sources for n, box in enumerate(halves)]
    one, other = add.sources
    crossed = [Add((f"{one}0", f"{other}1"), "a"), Add((f"{one}1", f"{other}0"), "b"), Join(("a", "b"), 0, add.output)]
    with pytest.raises(ConfigError, match=r"adds y of micro-batch 0 \[0:3, 0:8\] and y of micro-batch 0 \[3:6, 0:8\]"):
        check_program(MODEL, edited({Add: cuts + crossed}))
    straight = [Add((f"{one}0", f"{other}0"), "a"), Add((f"{one}1", f"{other}1"), "b"), crossed[-1]]
    check_program(MODEL, edited({Add: cuts + straight}))


def test_half_of_what_an_operator_needs_is_found() -> None:
    add = first(Add, edited({}))
    half = [Add(add.sources, "y"), Cut("y", ((0, 3), (0, 8)), add.output)]
    with pytest.raises(
        ConfigError, match=r"gets y of micro-batch 0 \[0:3, 0:8\], \[3, 8\]; expected y of micro-batch 0 \[0:6"
    ):
        check_program(MODEL, edited({Add: half}))


def test_a_program_is_plain_data() -> None:
    program = plan(1).program
    assert msgspec.json.decode(msgspec.json.encode(program), type=Program) == program
