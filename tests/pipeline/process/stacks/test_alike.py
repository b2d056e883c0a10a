"""Groups of workers by where they stand, from made looks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.process.stacks.parse import Stack, StackCall, StackGroup, StackSnapshot, stack_groups

IDLE = Stack("main", (StackCall("/lib/python3.11/selectors.py", 468, "select"),))
NO_WORK = Stack("compute", (StackCall("/lib/python3.11/concurrent/futures/thread.py", 81, "_worker"),))


def computes(function: str, line: int = 1) -> Stack:
    return Stack("compute", (StackCall("/x/workers/engine.py", line, function), StackCall("/x/actor.py", 7, "run")))


def awaits(function: str) -> Stack:
    return Stack("task life", (StackCall("/x/pipeline/runtime/clock.py", 40, function),))


def look(worker: str, *stacks: Stack, role: str = "generator") -> StackSnapshot:
    return StackSnapshot(worker, role, (IDLE, *stacks), is_whole=True)


def groups_of(**stacks: tuple[Stack, ...]) -> list[StackGroup]:
    return stack_groups({name: [look(name, *of)] for name, of in stacks.items()})


def test_the_largest_group_is_the_rule_and_smaller_ones_are_unlike():
    same, sample = (computes("step"),), (computes("deadlock"),)
    groups = groups_of(a=same, b=same, c=sample, d=same)
    assert [(group.workers, group.is_unlike) for group in groups] == [(("a", "b", "d"), False), (("c",), True)]
    assert groups[1].calls == ("deadlock (workers/engine.py:1)", "run (x/actor.py:7)")


def test_groups_of_one_size_blame_none_of_them():
    groups = groups_of(a=(computes("step"),), b=(computes("other"),))
    assert [group.is_unlike for group in groups] == [False, False]


def test_roles_are_not_compared_with_one_another():
    looks = {"a": [look("a", computes("step"))], "b": [look("b", computes("verify"), role="reward")]}
    assert [(group.role, group.is_unlike) for group in stack_groups(looks)] == [("generator", False), ("reward", False)]


def test_a_loop_in_one_function_stands_though_its_lines_change():
    looks = {"a": [look("a", computes("spin", line)) for line in (3, 4, 3)]}
    assert [(group.where, group.calls[0]) for group in stack_groups(looks)] == [
        ("compute", "spin (workers/engine.py:3)")
    ]


def test_a_computation_that_goes_on_moves_and_does_not_stand():
    looks = {"a": [look("a", computes("first")), look("a", computes("second"))]}
    assert [(group.where, group.calls) for group in stack_groups(looks)] == [("moves", ())]
    began = {"a": [look("a", NO_WORK, awaits("sleep")), look("a", computes("second"), awaits("sleep"))]}
    assert [group.where for group in stack_groups(began)] == ["moves"]


def test_an_idle_worker_stands_where_its_task_waits():
    looks = {"a": [look("a", NO_WORK, awaits("wait"))] * 2}
    assert [(group.where, group.calls) for group in stack_groups(looks)] == [
        ("task life", ("wait (runtime/clock.py:40)",))
    ]


@pytest.mark.parametrize("function", ["_worker", "select"])
def test_ones_own_function_by_the_name_of_an_idle_one_is_no_idleness(function: str):
    (group,) = stack_groups({"a": [look("a", computes(function))]})
    assert group.where == "compute"


@given(st.lists(st.sampled_from(["step", "wait", "verify"]), min_size=1, max_size=8))
def test_every_worker_is_in_one_group_and_none_is_unlike_the_largest(functions: list[str]):
    groups = stack_groups({f"w{i}": [look(f"w{i}", computes(name))] for i, name in enumerate(functions)})
    assert sorted(worker for group in groups for worker in group.workers) == sorted(
        f"w{i}" for i in range(len(functions))
    )
    largest = max(len(group.workers) for group in groups)
    assert all(group.is_unlike == (len(group.workers) < largest) for group in groups)
