"""Claims about ``headrace bench snapshots``: what is compared with what, and what decides."""

from __future__ import annotations

from pathlib import Path

import pytest

from ops.bench import snapshots
from ops.bench.snapshots import BAR, BLOCKING, KINDS, LENT, OFF, Turn, UpdateCost, holds, in_turn, lost_shares, measure
from ops.bench.table import Spread


def cost(**seconds: list[float]) -> UpdateCost:
    turns = {
        kind: [Turn(value, wait_s=value / 10, beside_s=0.2) for value in values] for kind, values in seconds.items()
    }
    return UpdateCost("model", 10, 100, turns)


def test_the_rate_lost_is_of_turns_of_the_same_round() -> None:
    found = cost(off=[1.0, 2.0, 4.0], blocking=[2.0, 4.0, 8.0], lent=[1.0, 2.0, 5.0])
    assert found.lost(BLOCKING) == Spread(0.5, 0.5, 0.5)
    assert (found.lost(LENT).median, found.lost(LENT).high) == (0.0, pytest.approx(0.2))
    assert found.off_s.median == 2.0 and found.wait_s(LENT).median == pytest.approx(0.2)
    with pytest.raises(ValueError, match="longer"):
        lost_shares([1.0], [1.0, 2.0])


def test_a_snapshot_costs_at_most_what_was_waited_and_what_was_done_beside() -> None:
    most = cost(off=[1.0], lent=[2.0, 4.0, 1.0]).most(LENT)
    assert (most.low, most.median, most.high) == pytest.approx((0.15, 0.2, 0.3))


@pytest.mark.parametrize(
    ("waited_s", "beside_s", "of_runs", "is_held"),
    [
        (0.0, 0.9 * BAR, None, True),
        (0.9 * BAR, 0.0, None, True),
        (0.9 * BAR, 0.9 * BAR, None, False),
        (0.0, 0.0, BAR, True),
        (0.0, 0.0, 2 * BAR, False),
    ],
)
def test_the_most_that_lent_copies_cost_decides_and_whole_runs_where_there_are_any(
    waited_s: float, beside_s: float, of_runs: float | None, is_held: bool
) -> None:
    """A blocking copy may cost what it likes."""
    lent = [Turn(1.0), Turn(1.0, waited_s, beside_s), Turn(1.0, 0.5, 0.5)]
    found = UpdateCost("model", 10, 100, {OFF: [Turn(1.0)], BLOCKING: [Turn(9.0, 8.0)], LENT: lent})
    assert holds([found], None if of_runs is None else Spread(of_runs, -1.0, 1.0)) is is_held


def test_each_kind_begins_every_third_round() -> None:
    orders = [in_turn(number) for number in range(-1, 2)]
    assert sorted(order[0] for order in orders) == sorted(KINDS)
    assert all(sorted(order) == sorted(KINDS) for order in orders)


def test_a_measurement_has_turns_of_all_kinds_and_leaves_no_shared_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshots, "_IN_A_ROW", 1)
    monkeypatch.setattr(snapshots, "snapshots_folder", lambda _: tmp_path / "snapshots")
    found = measure("demo", snapshots._DEMO, response=2.0, rounds=1)
    assert {kind: len(turns) for kind, turns in found.turns.items()} == dict.fromkeys(KINDS, 1)
    assert found.turns[OFF][0].wait_s == 0.0
    assert found.wait_s(LENT).median > 0.0 and found.wait_s(BLOCKING).median > 0.0
    assert found.state_bytes > 1e6 and found.beside_s(LENT).low > 0.0 and found.beside_s(OFF).high == 0.0
    assert not (tmp_path / "snapshots").exists()
