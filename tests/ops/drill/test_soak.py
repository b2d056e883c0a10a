"""Claims about the long drill: its faults, their times, and the cost of each."""

from __future__ import annotations

import subprocess
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ops.drill import faults, soak
from ops.drill.check import Violation
from ops.drill.faults import Site, Striking
from ops.drill.fleet import DrillFleet
from ops.drill.schedule import FaultKind, PlannedFault
from ops.drill.soak import SoakFault, SoakRecord, planned, spoken, table, with_costs


def record(*faults: SoakFault) -> SoakRecord:
    return SoakRecord(0, 2.0, (), (0.5, 0.7), 100.0, 150, faults, (), 0.9, 0.5, (1.0, 3.0), (), (1.0, 2.0))


@given(st.integers(0, 10_000), st.floats(0.5, 60.0))
def test_a_soak_has_two_faults_a_minute_within_its_time_the_kinds_in_turn(seed: int, minutes: float) -> None:
    faults = planned(seed, minutes)
    assert len(faults) >= 2 * minutes
    times = [at_s for at_s, _ in faults]
    assert times == sorted(times) and times[0] > 0.0 and times[-1] < 60.0 * minutes + 30.0
    kinds = Counter(fault.kind for _, fault in faults)
    assert (
        not kinds
        or max(kinds.values()) - min(kinds.values() if len(kinds) == len(FaultKind) - len(soak._LEFT_OUT) else [0]) <= 1
    )
    assert faults == planned(seed, minutes)


def test_half_an_hour_has_sixty_faults_and_every_kind_that_one_fleet_can_have() -> None:
    faults = planned(0, 30.0)
    assert len(faults) == 60
    assert {fault.kind for _, fault in faults} == set(FaultKind) - soak._LEFT_OUT


def test_a_fault_costs_the_time_until_the_next_less_that_of_the_updates_in_it() -> None:
    faults = [SoakFault("a", "x", 10.0, 12.0), SoakFault("b", "y", 20.0, 20.0), SoakFault("c", "z", 30.0, 31.0)]
    updates = [5.0, *(10.5 + each for each in range(4)), *(20.5 + each for each in range(10)), 33.0]
    assert [fault.lost_s for fault in with_costs(faults, updates, 34.0, 1.0)] == [6.0, 0.0, 3.0]


@given(
    st.lists(st.floats(0.0, 100.0), max_size=50).map(sorted), st.lists(st.floats(0.0, 100.0), min_size=1).map(sorted)
)
def test_no_cost_is_below_nothing_or_longer_than_its_time(updates: list[float], begins: list[float]) -> None:
    faults = with_costs([SoakFault("a", "x", at_s, at_s) for at_s in begins], updates, 101.0, 0.7)
    spans = [until - begin for begin, until in zip(begins, [*begins[1:], 101.0], strict=True)]
    assert all(0.0 <= fault.lost_s <= span + 0.01 for fault, span in zip(faults, spans, strict=True))


def test_the_rate_kept_is_that_of_the_updates_against_both_fleets_without_faults() -> None:
    # 150 updates of 0.6 s in 100 s
    assert record().kept == pytest.approx(0.9)
    assert "rate kept: 0.900 (bar 0.95)" in spoken(record())


def test_the_table_sums_up_by_kind_the_dearest_first_and_violations_are_named() -> None:
    faults = [
        SoakFault("a", "x", 0.0, 1.0, 0.5),
        SoakFault("b", "y", 5.0, 8.0, 4.0),
        SoakFault("a", "x", 9.0, 11.0, 1.5),
    ]
    lines = table(record(*faults)).splitlines()[2:]
    assert lines == ["| b | 1 | 3.0 | 4.0 | 4.0 |", "| a | 2 | 1.5 | 1.0 | 1.5 |"]
    broken = replace(record(), violations=(Violation("one end", "t.1.1 was lost"),))
    assert "1 violations\n  one end: t.1.1 was lost" in spoken(broken)


@dataclass
class StoppableFleet:
    """The parts of a fleet that a hangup needs; its supervisor is a process that SIGHUP ends."""

    supervisor: subprocess.Popen[bytes]
    run_dir: Path
    happened: list[str] = field(default_factory=list[str])

    def updates(self) -> list[Any]:
        return []

    def resume(self) -> None:
        self.happened.append("resumed")


@pytest.mark.parametrize(("asks", "expected"), [(True, ["why", "resumed"]), (False, ["resumed"])])
def test_a_hung_up_run_is_resumed_at_once_unless_its_cause_is_to_be_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asks: bool, expected: list[str]
) -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        fleet = StoppableFleet(process, tmp_path)
        monkeypatch.setattr(faults, "ask_until_named", lambda *_: fleet.happened.append("why"))
        monkeypatch.setattr(faults, "look_for_leftovers", lambda *_: None)
        Striking(PlannedFault(FaultKind.HANGUP, 0.0, 0), Site(cast("DrillFleet", fleet), asks=asks))
    assert fleet.happened == expected


def test_a_soak_has_no_cause_named(tmp_path: Path) -> None:
    with soak._fleet(tmp_path, 0, ()) as (_, site):
        assert not site.asks
