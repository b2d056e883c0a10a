"""Claims about what a person sees of the copies at a run's end."""

from __future__ import annotations

import pytest

from pipeline.supervisor.copy_progress import CopyBars
from pipeline.training.mirror.layout import MirrorRecord, MirrorState
from tests.driven_progress import DrivenProgress

URL = "s3://bucket/op"


def record(started_s: float, done: int, total: int, state: MirrorState = MirrorState.COPYING) -> MirrorRecord:
    return MirrorRecord(
        url=URL, state=state, checkpoint="000002.version-6", started_s=started_s, done_bytes=done, total_bytes=total
    )


def test_a_copy_at_the_end_has_its_share_and_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = DrivenProgress(monkeypatch)
    with CopyBars(URL, plain=True) as shown:
        shown.show(record(1.0, 0, 100_000_000))
        seen.let_pass(5.0)
        shown.show(record(1.0, 25_000_000, 100_000_000))
        seen.let_pass(10.0)
        shown.show(record(1.0, 100_000_000, 100_000_000, MirrorState.DONE))
    assert seen.lines == [
        "copying to s3://bucket/op: 000002.version-6, 0 %, 0 of 100 MB, no estimate yet",
        "copying to s3://bucket/op: 000002.version-6, 25 %, 25 of 100 MB, about 0:45 left",
        "copying to s3://bucket/op: done after 0:15",
    ]


def test_a_copy_that_was_under_way_is_estimated_by_what_comes_from_now_on(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = DrivenProgress(monkeypatch)
    with CopyBars(URL, plain=True) as shown:
        shown.show(record(1.0, 80_000_000, 100_000_000))
        shown.show(record(1.0, 90_000_000, 100_000_000))
        seen.let_pass(4.0)
        assert seen.lines[-1].endswith("50 %, 10 of 20 MB, about 0:04 left"), "not 90 % in four seconds"
        # The last copy follows, and has little to move.
        shown.show(record(9.0, 0, 0))
        shown.show(record(10.0, 0, 2_000_000))
        shown.show(record(10.0, 1_000_000, 2_000_000))
        seen.let_pass(2.0)
        assert seen.lines[-1].endswith("50 %, 1 of 2 MB, about 0:02 left"), "the first copy's time is not its own"


def test_a_copy_that_fails_or_is_given_up_is_not_reported_as_done(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = DrivenProgress(monkeypatch)
    with CopyBars(URL, plain=True) as shown:
        shown.show(record(1.0, 1, 100))
        seen.let_pass(3.0)
        shown.show(record(1.0, 1, 100, MirrorState.FAILED))
        assert seen.lines[-1] == "copying to s3://bucket/op: stopped after 0:03"
        shown.show(record(2.0, 1, 100))
        seen.let_pass(4.0)
    assert seen.lines[-1] == "copying to s3://bucket/op: stopped after 0:04"


def test_reading_before_a_copy_is_no_part_of_its_estimate(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = DrivenProgress(monkeypatch)
    with CopyBars(URL, plain=True) as shown:
        shown.show(MirrorRecord(url=URL, state=MirrorState.COPYING, started_s=1.0))
        seen.let_pass(30.0)
        assert seen.lines[-1] == "preparing the copy to s3://bucket/op: 0:30 so far"
        shown.show(record(31.0, 0, 100_000_000))
        shown.show(record(31.0, 50_000_000, 100_000_000))
        seen.let_pass(6.0)
        assert seen.lines[-1].endswith("50 %, 50 of 100 MB, about 0:06 left")


def test_a_copy_that_ends_within_two_seconds_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = DrivenProgress(monkeypatch)
    with CopyBars(URL, plain=True) as shown:
        shown.show(None)
        shown.show(record(1.0, 0, 100))
        seen.let_pass(1.9)
        shown.show(record(1.0, 100, 100, MirrorState.DONE))
        seen.let_pass(60.0)
    assert seen.lines == []
