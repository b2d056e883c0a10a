"""Claims about the words of a change of a run's settings."""

from __future__ import annotations

import msgspec

from pipeline.observability.settings_changes import change_words
from pipeline.runtime.registry.settings_change import after, undoing

KEY = "learner.learning_rate"


def test_a_rollback_names_the_changes_that_it_undoes() -> None:
    first = after(None, {KEY: "0.5"}, {KEY: "1"}, by="ann@a", at_s=1.0)
    second = after(first, {KEY: "0.25"}, {KEY: "0.5"}, by="ann@a", at_s=2.0)
    assert change_words(second) == f"change 2: {KEY} 0.25, was 0.5"
    both = undoing([first, second], [first, second], by="learner", at_s=3.0)
    assert change_words(both) == f"change 3, which undoes 1, 2: {KEY} 1, was 0.25"
    older = msgspec.structs.replace(both, undone=())
    assert change_words(older) == f"change 3, which undoes 1 and those after it: {KEY} 1, was 0.25"
