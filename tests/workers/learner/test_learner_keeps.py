"""Claims about the times of the learner's checkpoints."""

from __future__ import annotations

from pipeline.config.runtime import CheckpointSection
from pipeline.ledger.pacing import is_idle_due
from workers.checkpoint_writer import CheckpointTimes

SETTINGS = CheckpointSection(every_updates=10, every_s=300.0)


def is_due(times: CheckpointTimes, now_s: float, num_updates: int = 1, *, last_s: float = 0.0) -> bool:
    return times.is_due(SETTINGS, now_s, num_updates, is_writing=False, last_s=last_s)


def test_the_first_long_update_is_kept_at_once_and_a_short_one_is_not() -> None:
    times = CheckpointTimes(100.0, has_checkpoint=False, is_on_disk=True)
    assert not is_due(times, 103.0), "three seconds are soon made again"
    assert is_due(times, 133.0)
    assert not times.is_due(SETTINGS, 133.0, 1, is_writing=True, last_s=0.0), "it is on its way to the disk"


def test_later_ones_are_kept_by_number_or_time_and_no_more_often_than_writing_allows() -> None:
    times = CheckpointTimes(0.0, has_checkpoint=True, is_on_disk=True)
    assert not is_due(times, 200.0)
    assert is_due(times, 200.0, 10)
    assert is_due(times, 350.0, 11)
    assert not is_due(times, 350.0, 11, last_s=60.0), "writing would take a sixth of the time"
    assert is_due(times, 650.0, 11, last_s=60.0)
    times.began(650.0)
    assert not is_due(times, 900.0, 12)


def test_after_a_restart_from_a_snapshot_the_first_update_is_kept() -> None:
    times = CheckpointTimes(0.0, has_checkpoint=True, is_on_disk=False)
    assert is_due(times, 1.0)
    times.began(1.0)
    assert not is_due(times, 2.0, 2)


def test_an_idle_learner_keeps_after_some_seconds_or_ten_times_what_writing_takes() -> None:
    assert not is_idle_due(4.9, last_s=0.0) and is_idle_due(5.0, last_s=0.0)
    assert not is_idle_due(9.9, last_s=1.0) and is_idle_due(10.0, last_s=1.0)
