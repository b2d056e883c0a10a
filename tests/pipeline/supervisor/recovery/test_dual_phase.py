"""Faulty workers are found by the failing groups of two groupings, or of three."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.supervisor.recovery.dual_phase import MOST_SUSPECTS, FaultFinder, Grid


def found(num: int, faulty: set[int], *, grid: Grid | None = None) -> set[int]:
    """Search among ``num`` workers, whose faults show in every check."""
    search = FaultFinder([str(worker) for worker in range(num)], rounds=1, grid=grid)
    while groups := search.groups:
        search.note([place for place, group in enumerate(groups) if faulty & set(map(int, group))])
    return set(map(int, search.suspects))


@pytest.mark.parametrize(("grid", "ambiguous"), [((4, 6), 0), ((6, 6), 0), ((8, 16), 0), ((6, 4), 16)])
def test_one_faulty_worker_is_found_alone_where_m_is_at_most_n(grid: tuple[int, int], ambiguous: int) -> None:
    shape, num = Grid(*grid), grid[0] * grid[1]
    two_phases = [
        sum(all(shape.group_of(x, phase) == shape.group_of(bad, phase) for phase in (1, 2)) for x in range(num))
        for bad in range(num)
    ]
    assert sum(shared > 1 for shared in two_phases) == ambiguous
    assert shape.is_unique == (ambiguous == 0)
    assert all(bad in found(num, {bad}, grid=shape) for bad in range(num))


@pytest.mark.parametrize("num", range(1, 65))
def test_a_fleet_of_any_size_has_a_grid_that_finds_each_worker_alone(num: int) -> None:
    assert Grid.of(num).is_unique
    assert all(found(num, {bad}) == {bad} for bad in range(num))
    assert found(num, set()) == set(), "no group failed"


def test_two_and_three_faulty_workers_are_always_among_few_suspects() -> None:
    most = 0
    for num_faulty in (2, 3):
        for bad in map(set, combinations(range(24), num_faulty)):
            suspects = found(24, bad)
            assert bad <= suspects and len(suspects) <= num_faulty**2
            if num_faulty == 2:
                assert len(suspects) <= MOST_SUSPECTS
            most = max(most, len(suspects))
    assert most <= 6, "the third grouping leaves few of nine"


@given(st.data())
def test_a_fault_that_shows_in_one_round_of_each_phase_is_found(data: st.DataObject) -> None:
    num = data.draw(st.integers(2, 80))
    bad, rounds = data.draw(st.integers(0, num - 1)), data.draw(st.integers(1, 4))
    search = FaultFinder([str(worker) for worker in range(num)], rounds=rounds)
    for _ in range(2):
        shows = data.draw(st.integers(0, rounds - 1))
        for number in range(rounds):
            places = [at for at, group in enumerate(search.groups) if str(bad) in group and number == shows]
            search.note(places)
    assert search.suspects == (str(bad),) and search.groups == ()


def test_every_worker_is_in_one_group_of_each_phase() -> None:
    for num in range(1, 65):
        grid = Grid.of(num)
        for phase in (1, 2, 3):
            groups = grid.groups(num, phase)
            assert sorted(worker for group in groups for worker in group) == list(range(num))
            assert max(map(len, groups)) <= grid.num_groups


def test_a_search_without_workers_rounds_or_room_is_refused_as_is_an_ended_one() -> None:
    for refused in (
        lambda: FaultFinder([]),
        lambda: FaultFinder(["a"], rounds=0),
        lambda: FaultFinder("abc", grid=Grid(1, 2)),
    ):
        with pytest.raises(ValueError, match=r"expected"):
            refused()
    search = FaultFinder(["a", "b"], rounds=1)
    search.note([])
    assert search.suspects == () and search.groups == ()
    with pytest.raises(ValueError, match="has ended"):
        search.note([])
