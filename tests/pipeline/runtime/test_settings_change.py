"""Claims about changes of a run's settings, and what is left when some are rolled back."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from pipeline.runtime.registry.settings_change import SettingsChange, after, standing, undoing

RATE, CLIP = "learner.learning_rate", "algorithm.clip_low"
START = {RATE: "1", CLIP: "0.2"}


def made(*sets: dict[str, str]) -> list[SettingsChange]:
    changes: list[SettingsChange] = []
    for one in sets:
        last = changes[-1] if changes else None
        holds = START | (last.holds if last else {})
        changes.append(after(last, one, {key: holds[key] for key in one}, by="ann@a", at_s=1.0))
    return changes


def rolled_back(changes: Sequence[SettingsChange], *numbers: int) -> list[SettingsChange]:
    undone = [change for change in changes if change.number in numbers]
    return [*changes, undoing(changes, undone, by="learner", at_s=2.0)]


def test_a_rollback_leaves_other_changes_as_they_are() -> None:
    changes = rolled_back(made({RATE: "5"}, {CLIP: "0.3"}), 1)
    assert (changes[-1].sets, changes[-1].former) == ({RATE: "1"}, {RATE: "5"})
    assert changes[-1].holds == {RATE: "1", CLIP: "0.3"}
    assert [change.number for change in standing(changes)] == [2]
    assert [changes[-1].rolls_back(number) for number in range(4)] == [False, True, False, False]


def test_a_value_that_a_later_change_set_stays_and_its_rollback_skips_the_failed_one() -> None:
    changes = rolled_back(made({RATE: "5"}, {RATE: "7"}), 1)
    assert changes[-1].holds == {RATE: "7"}
    assert rolled_back(changes, 2)[-1].holds == {RATE: "1"}, "the rolled back 5 does not come back"


def test_a_rollback_of_an_earlier_release_undoes_all_after_it() -> None:
    changes = made({RATE: "5"}, {CLIP: "0.3"})
    older = msgspec.structs.replace(rolled_back(changes, 1)[-1], undone=())
    assert standing([*changes, older]) == []
    assert [older.rolls_back(number) for number in range(5)] == [False, True, True, False, False]


@given(st.lists(st.tuples(st.sampled_from([RATE, CLIP]), st.integers(0, 9), st.booleans()), max_size=12))
def test_what_holds_is_what_the_standing_changes_have_set(steps: list[tuple[str, int, bool]]) -> None:
    changes: list[SettingsChange] = []
    for key, number, is_undo in steps:
        found = standing(changes)
        if is_undo and found:
            changes = rolled_back(changes, found[number % len(found)].number)
        else:
            last = changes[-1] if changes else None
            holds = START | (last.holds if last else {})
            changes.append(after(last, {key: f"v{number}"}, {key: holds[key]}, by="ann@a", at_s=1.0))
    wanted = dict(START)
    for change in standing(changes):
        wanted |= change.sets
    assert START | (changes[-1].holds if changes else {}) == wanted
