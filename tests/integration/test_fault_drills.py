"""Fault drills with fixed seeds that have every kind of fault: nothing that must hold is violated.

A seed that fails here is repeated by this test alone (``-k SEED``); its folder is kept."""

from __future__ import annotations

import pytest

from ops.drill.__main__ import folder_of, line
from ops.drill.fleet import ROOT
from ops.drill.one import drill
from ops.drill.schedule import KINDS, STARTS, FaultKind, plan

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

_NEVER = FaultKind.DEAD_FROZEN_SERVER
"""A server that is frozen for good takes as long as the supervisor's patience;
``python -m ops.drill`` drills it."""
AMONG_THEMSELVES = (
    *(kind for kind in KINDS if kind in STARTS),
    FaultKind.BUSY_SERVER,
    FaultKind.ENDLESS_SCRIPT,
    FaultKind.JUNK,
    FaultKind.SLOW_VERDICTS,
    FaultKind.LATE_VERDICTS,
    FaultKind.TINY_MEMORY,
)
OTHERS = tuple(kind for kind in KINDS if kind is not _NEVER and kind not in AMONG_THEMSELVES)
QUICK = ((59, AMONG_THEMSELVES),)
LONG = (
    *((seed, OTHERS) for seed in (4693, 3442, 1116, 5748, 5864, 2137, 4377, 3000, 2142)),
    *((seed, AMONG_THEMSELVES) for seed in (36, 120, 4, 6, 70, 8)),
)
"""Together these seeds have every kind of a fleet without an environment, in as little time as was
found. `make test` has the quick ones, `make test-long` the others; the kinds of a fleet with one
are in `test_environment.py` and `python -m ops.drill --environment`."""
_PATIENCE_S = 240.0
"""Of a machine that others use, too: that nothing waits for ever is the claim, not that nothing is
slow."""


def test_the_seeds_have_every_kind_of_fault() -> None:
    found = frozenset().union(*(plan(seed, kinds).kinds for seed, kinds in (*QUICK, *LONG)))
    assert found == frozenset(KINDS) - {_NEVER}


@pytest.mark.parametrize(
    ("seed", "kinds"), [*QUICK, *(pytest.param(*each, marks=pytest.mark.long) for each in LONG)],
    ids=[str(seed) for seed, _ in (*QUICK, *LONG)],
)  # fmt: skip
def test_nothing_is_lost_or_done_twice_whatever_fails(
    seed: int, kinds: tuple[FaultKind, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    schedule = plan(seed, kinds)
    outcome = drill(schedule, folder_of(seed), patience_s=_PATIENCE_S)
    print(line(outcome))
    assert not outcome.violations, line(outcome)
    assert len(outcome.resume_s) == len(schedule.rounds), "a round of faults came after the run's end"
