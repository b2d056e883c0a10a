"""Claims about the versions of code that a run's folder keeps."""

from __future__ import annotations

from pipeline.config.operations import REWARDS, WORKERS
from pipeline.runtime.registry.settings_change import SettingsChange, after, undoing
from pipeline.supervisor.code_versions import named_versions

KEY = "learner.learning_rate"


def made(*steps: tuple[str, str]) -> list[SettingsChange]:
    changes: list[SettingsChange] = []
    for key, value in steps:
        last = changes[-1] if changes else None
        former = last.holds.get(key, '""') if last else '""'
        changes.append(after(last, {key: f'"{value}"'}, {key: former}, by="ann@a", at_s=1.0))
    return changes


def test_versions_that_hold_come_first_then_those_of_standing_changes() -> None:
    changes = made((REWARDS, "a"), (WORKERS, "w"), (REWARDS, "b"), (KEY, "0.5"), (REWARDS, "c"), (REWARDS, "d"))
    assert named_versions(changes) == ["d", "w", "c", "b", "a"]
    back = [*changes, undoing(changes, changes[-1:], by="reward-1", at_s=2.0)]
    assert named_versions(back) == ["c", "w", "b", "a"], "one that was rolled back is not gone back to"
    assert named_versions([]) == []
