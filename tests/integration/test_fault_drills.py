"""Fault drills with fixed seeds that have every kind of fault: nothing that must hold is violated.

A seed that fails here is repeated by this test alone (``-k SEED``); its folder is kept."""

from __future__ import annotations

import pytest

from ops.drill.__main__ import folder_of, line
from ops.drill.fleet import ROOT
from ops.drill.one import drill
from ops.drill.schedule import FaultKind, plan

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

SEEDS = (4693, 5748, 3442, 1116)
LONG_SEEDS = (5864, 2137, 4377, 3000, 2142)
"""Together these seeds have every kind, in as little time as was found. `make test` has the quick
ones, `make test-long` the others."""
KINDS = tuple(kind for kind in FaultKind if kind is not FaultKind.DEAD_FROZEN_SERVER)
"""A server that is frozen for good takes as long as the supervisor's patience;
``python -m ops.drill`` drills it."""
_PATIENCE_S = 240.0
"""Of a machine that others use, too: that nothing waits for ever is the claim, not that nothing is
slow."""


def test_the_seeds_have_every_kind_of_fault() -> None:
    assert frozenset().union(*(plan(seed, KINDS).kinds for seed in (*SEEDS, *LONG_SEEDS))) == frozenset(KINDS)


@pytest.mark.parametrize("seed", [*SEEDS, *(pytest.param(seed, marks=pytest.mark.long) for seed in LONG_SEEDS)])
def test_nothing_is_lost_or_done_twice_whatever_fails(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    schedule = plan(seed, KINDS)
    outcome = drill(schedule, folder_of(seed), patience_s=_PATIENCE_S)
    print(line(outcome))
    assert not outcome.violations, line(outcome)
    assert len(outcome.resume_s) == len(schedule.rounds), "a round of faults came after the run's end"
