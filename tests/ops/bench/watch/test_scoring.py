"""The scoring, by cases worked by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from ops.bench.watch.__main__ import bars, run_case
from ops.bench.watch.cases import BENIGN, CONCURRENT, Case, Fault, Kind, Truth
from ops.bench.watch.scoring import Alarm, Outcome, is_decided, judge, summarise

CASE = Case("dev", 8, "slow x4", 0)
SLOW = Truth((Fault(Kind.SLOW, "a", 300.0, 4.0),))
KILLED = Truth((Fault(Kind.KILLED, "a", 300.0, 1.0),))
TWO = Truth((Fault(Kind.KILLED, "a", 300.0, 1.0), Fault(Kind.SLOW, "b", 350.0, 2.0)))


def outcome(truth: Truth, *alarms: tuple[float, str]) -> Outcome:
    label = BENIGN if not truth.faults else CONCURRENT if len(truth.faults) > 1 else CASE.label
    case = Case("dev", 8, label, 0)
    return judge(case, truth, [Alarm(now, worker) for now, worker in alarms])


def counts(result: Outcome) -> tuple[int, int, int]:
    """Return true positives, false positives and misses."""
    return result.num_found, result.num_wrong, len(result.kinds) - result.num_found


@pytest.mark.parametrize(
    ("truth", "alarms", "expected"),
    [
        (SLOW, [(360.0, "a")], (1, 0, 0)),
        (SLOW, [], (0, 0, 1)),
        (SLOW, [(541.0, "a")], (0, 0, 1)),
        (SLOW, [(360.0, "b")], (0, 1, 1)),
        (SLOW, [(299.0, "a")], (0, 1, 1)),
        (SLOW, [(200.0, "b"), (360.0, "a")], (0, 1, 1)),
        (SLOW, [(360.0, "a"), (361.0, "b")], (1, 0, 0)),
        (SLOW, [(360.0, "a"), (360.0, "b")], (1, 1, 0)),
        (KILLED, [(310.0, "a")], (1, 0, 0)),
        (KILLED, [(311.0, "a")], (0, 0, 1)),
        (TWO, [(305.0, "a"), (400.0, "b")], (2, 0, 0)),
        (TWO, [(305.0, "a")], (1, 0, 1)),
        (TWO, [(305.0, "c"), (306.0, "a"), (400.0, "b"), (410.0, "c")], (2, 1, 0)),
        (TWO, [(305.0, "a"), (340.0, "b")], (1, 1, 1)),
        (Truth(), [], (0, 0, 0)),
        (Truth(), [(10.0, "a"), (20.0, "b")], (0, 1, 0)),
    ],
)
def test_alarms_count_as_right_wrong_or_missed(
    truth: Truth, alarms: list[tuple[float, str]], expected: tuple[int, int, int]
) -> None:
    assert counts(outcome(truth, *alarms)) == expected


def test_later_alarms_are_not_waited_for_once_a_window_is_decided() -> None:
    assert not is_decided(SLOW, [], 540.0)
    assert is_decided(SLOW, [], 541.0)
    assert is_decided(SLOW, [Alarm(310.0, "b")], 310.0)
    assert not is_decided(TWO, [Alarm(310.0, "a")], 400.0)
    assert is_decided(TWO, [Alarm(310.0, "a"), Alarm(400.0, "b")], 400.0)
    assert not is_decided(Truth(), [Alarm(10.0, "a")], 899.0)


def test_a_missed_fault_has_an_infinite_delay() -> None:
    results = [outcome(SLOW, (330.0, "a")), outcome(SLOW, (420.0, "a")), outcome(SLOW)]
    total = summarise(results)
    assert total.delay_s == (120.0, math.inf, math.inf)


def test_precision_recall_and_f1_are_of_all_windows_together() -> None:
    results = [
        outcome(SLOW, (330.0, "a")),
        outcome(SLOW, (330.0, "b")),
        outcome(SLOW),
        outcome(Truth(), (5.0, "a")),
        outcome(Truth(), (9.0, "b")),
        outcome(Truth()),
    ]
    total = summarise(results)
    # one right, three false, two missed
    assert total.precision.share == pytest.approx(1 / 4)
    assert total.recall.share == pytest.approx(1 / 3)
    assert total.f1.share == pytest.approx(2 / (2 + 3 + 2))
    assert total.blamed.share == pytest.approx(2 / 3)


def test_each_bar_is_judged_by_size_and_misses_count() -> None:
    right = [outcome(SLOW, (400.0, "a"))] * 3 + [outcome(Truth())]
    assert all(bars(right, 8).values())
    late = replace(right[0], delays_s=(200.0,))
    assert [bar for bar, holds in bars([*right, late, late], 8).items() if not holds] == ["gray P90 at most 120 s"]
    blamed = bars([*right, outcome(Truth(), (5.0, "b"))], 8)
    assert not blamed["blame at most 2%"]
    assert not bars([*right, outcome(SLOW)], 8)["F1 at least 0.96"]


def test_the_watch_finds_what_is_killed() -> None:
    found = run_case(Case("dev", 8, "killed", 0))
    assert (found.num_found, found.num_wrong) == (1, 0)
