"""Claims about the checker: it finds faults of any kind before anything runs, and refuses no program that is right."""

from __future__ import annotations

import random

import msgspec
import pytest

from pipeline.plan.programs.actions import Program
from pipeline.plan.programs.check import check_program
from protocol.errors import ConfigError
from tests.pipeline.plan.programs.faults import FAULTS, planted
from tests.pipeline.plan.programs.plans import Drawn, draw


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


def find_all(seeds: range, number: int) -> None:
    """Plant each kind of fault in so many plans."""
    rng = random.Random(0)
    found = dict.fromkeys(FAULTS, 0)
    for seed in seeds:
        drawn = plan(seed)
        for name, fault in FAULTS.items():
            wrong = planted(drawn.program, fault, rng) if found[name] < number else None
            if wrong is not None:
                with pytest.raises(ConfigError, match="device"):
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


def test_a_program_is_plain_data() -> None:
    program = plan(1).program
    assert msgspec.json.decode(msgspec.json.encode(program), type=Program) == program
