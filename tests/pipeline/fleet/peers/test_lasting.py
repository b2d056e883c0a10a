"""A finding that lasts: rules hold it, and similarity finds it again once it is forgotten."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pipeline.fleet.peers.frame import Finding, Frame
from pipeline.fleet.peers.watcher import Watch

WORKERS = tuple(f"generator-{number}" for number in range(8))
ROLES = ("generator",) * 8


def frames(begin_s: int, end_s: int, *, slow: bool, silent_s: float = 0.0) -> list[Frame]:
    rng = np.random.default_rng(begin_s)
    found: list[Frame] = []
    for second in range(begin_s, end_s):
        values = np.zeros((8, 2), np.float32)
        values[:, 0] = 1000.0 * rng.normal(1.0, 0.03, 8)
        values[2, 0] *= 0.25 if slow else 1.0
        values[5, 1] = silent_s
        found.append(Frame(float(second), WORKERS, ROLES, ("tokens_per_s", "heartbeat_age_s"), values))
    return found


def shifted(seen: list[Frame], by_s: float) -> list[Frame]:
    return [replace(frame, time_s=frame.time_s + by_s) for frame in seen]


def names(watch: Watch, seen: list[Frame]) -> list[Finding]:
    return [finding for frame in seen for finding in watch.tick(frame)]


def test_a_slow_worker_is_named_once_and_again_only_when_it_was_forgotten() -> None:
    watch = Watch()
    assert names(watch, frames(0, 300, slow=False)) == []
    (first,) = names(watch, frames(300, 600, slow=True))
    assert (first.worker, watch.lasts(first)) == ("generator-2", False)
    assert names(watch, frames(600, 700, slow=True)) == []
    watch.forget("generator-2")
    (again,) = names(watch, frames(700, 760, slow=True))
    assert again.worker == "generator-2"


def test_a_worker_that_is_well_again_is_not_named_once_it_was_forgotten() -> None:
    watch = Watch()
    names(watch, frames(0, 300, slow=False))
    assert len(names(watch, frames(300, 500, slow=True))) == 1
    assert names(watch, frames(500, 800, slow=False)) == []
    watch.forget("generator-2")
    assert names(watch, frames(800, 900, slow=False)) == []


def test_a_rules_finding_lasts_until_the_worker_is_well() -> None:
    watch = Watch()
    names(watch, frames(0, 20, slow=False))
    (silent,) = names(watch, frames(20, 60, slow=False, silent_s=30.0))
    assert watch.lasts(silent)
    assert names(watch, frames(60, 80, slow=False)) == []
    assert not watch.lasts(silent)
    assert not watch.lasts(Finding("gone", "generator", 0.0, 0.0, "silent", "", 1.0, ""))


def test_times_since_1970_change_nothing_but_the_times() -> None:
    seen = frames(0, 300, slow=False) + frames(300, 500, slow=True) + frames(500, 540, slow=False, silent_s=30.0)
    early = names(Watch(), seen)
    late = names(Watch(), shifted(seen, 1.75e9))
    assert len(early) == 2
    assert [(one.worker, one.kind, one.sentence) for one in early] == [
        (one.worker, one.kind, one.sentence) for one in late
    ]
    for before, after in zip(early, late, strict=True):
        assert after.since_s - 1.75e9 == pytest.approx(before.since_s, abs=0.01)
        assert after.alarm_s - 1.75e9 == before.alarm_s
