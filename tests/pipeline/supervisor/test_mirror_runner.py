"""Claims about copying beside a run: bounded, tried again, and never in the way of learning."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from pipeline.config.load import load_config
from pipeline.process.exit_codes import ExitCode
from pipeline.supervisor.mirror_runner import CopyBars, MirrorRunner
from pipeline.supervisor.side_process import SideProcess
from pipeline.supervisor.supervisor import mirror_runner
from pipeline.training.mirror.layout import MirrorRecord, MirrorState, list_copies, read_record, write_record
from pipeline.training.mirror.staging import STAGING
from protocol import headrace
from tests.driven_progress import DrivenProgress
from tests.pipeline.op_config import op_config
from tests.pipeline.training.mirror.mirrored import MirroredRun, mirrored_run


@pytest.fixture
def run(tmp_path: Path) -> MirroredRun:
    return mirrored_run(tmp_path)


def mirroring_of(run: MirroredRun, *overrides: str) -> MirrorRunner:
    settings = ("checkpoint.mirror_every_s=0", *overrides)
    return MirrorRunner(load_config([run.run_dir / "config.toml"], settings), run.run_dir)


def until(copies: MirrorRunner, condition: Callable[[], Any], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come"
        copies.poll(time.monotonic())
        time.sleep(0.02)


@pytest.fixture
def mute(run: MirroredRun) -> Iterator[Path]:
    """A mirror that takes a call and never answers: its owner's object is a pipe without a
    reader."""
    run.bucket.mkdir(parents=True)
    os.mkfifo(run.bucket / "owner.json")
    yield run.bucket / "owner.json"


class Copies:
    """The copying processes of a run, which end as the test says."""

    def __init__(self, run: MirroredRun, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun: list[float] = []
        self._code: int | None = None
        self._run, self._now, self._runs = run, 0.0, False
        monkeypatch.setattr(SideProcess, "start", lambda *_: self._begin())
        monkeypatch.setattr(SideProcess, "is_held", property(lambda _: self._runs))
        monkeypatch.setattr(SideProcess, "take_end", lambda _: self._code)
        monkeypatch.setattr(SideProcess, "kill", lambda _: setattr(self, "_runs", False))

    def _begin(self) -> None:
        self.begun.append(self._now)
        self._runs = True

    def poll(self, mirror: MirrorRunner, now: float, code: int | None = None, copied: str = "") -> None:
        """Poll at a time at which the copy has ended with ``code``, or moves on."""
        self._now, self._code = now, code
        if code is not None:
            state = MirrorState.DONE if code == ExitCode.OK else MirrorState.FAILED
            write_record(self._run.run_dir, MirrorRecord(url=URL, state=state, copied=copied))
        mirror.poll(now)


@pytest.fixture
def driven(run: MirroredRun, monkeypatch: pytest.MonkeyPatch) -> Copies:
    return Copies(run, monkeypatch)


def test_a_copy_begins_once_there_is_a_new_checkpoint_and_its_time_has_come(run: MirroredRun, driven: Copies) -> None:
    mirror = mirroring_of(run, "checkpoint.mirror_every_s=60")
    driven.poll(mirror, 0.0)
    run.checkpoint(3)
    driven.poll(mirror, 1.0)
    driven.poll(mirror, 5.0, ExitCode.OK, "000001.version-3")
    driven.poll(mirror, 99.0)
    assert driven.begun == [1.0]
    run.checkpoint(6)
    driven.poll(mirror, 100.0)
    driven.poll(mirror, 101.0, ExitCode.OK, "000002.version-6")
    run.checkpoint(9)
    driven.poll(mirror, 159.0)
    driven.poll(mirror, 160.0)
    assert driven.begun == [1.0, 100.0, 160.0]


def test_failed_copies_are_tried_again_after_growing_pauses(run: MirroredRun, driven: Copies) -> None:
    mirror = mirroring_of(run, "checkpoint.mirror_every_s=1000")
    run.checkpoint(3)
    for now in range(1300):
        driven.poll(mirror, float(now), ExitCode.FAILURE)
    pauses = [later - before for before, later in pairwise(driven.begun)]
    # a process ends at the poll after its start, and the next one starts at a later one
    assert [pause - 1.0 for pause in pauses] == [5, 10, 20, 40, 80, 160, 300, 300, 300]


def test_a_mirror_that_was_taken_over_is_left_alone(run: MirroredRun, driven: Copies) -> None:
    mirror = mirroring_of(run)
    run.checkpoint(3)
    driven.poll(mirror, 0.0)
    driven.poll(mirror, 1.0, ExitCode.FENCED)
    driven.poll(mirror, 1e9)
    assert driven.begun == [0.0]


def test_a_run_without_a_mirror_starts_nothing(tmp_path: Path) -> None:
    assert mirror_runner(op_config(tmp_path), tmp_path) is None


async def test_checkpoints_are_copied_beside_the_run_and_the_last_state_at_its_end(run: MirroredRun) -> None:
    copies = mirroring_of(run)
    copies.poll(0.0)
    assert read_record(run.run_dir) is None, "there is no checkpoint yet"
    run.checkpoint(3)
    until(copies, lambda: (found := read_record(run.run_dir)) and found.copied == "000001.version-3")
    run.checkpoint(6)
    (run.run_dir / "report.html").write_text("the end")
    assert await copies.finish(lambda: False) == ""
    copies.close()
    assert [name.rpartition("version-")[2] for name in list_copies(run.store)] == ["3.json", "6.json"]
    found = read_record(run.run_dir)
    assert found is not None and (found.state, found.copied) == (MirrorState.DONE, "000002.version-6")


async def test_a_person_who_waits_for_the_last_copy_sees_that_it_goes_on(
    run: MirroredRun, mute: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = DrivenProgress(monkeypatch)
    run.checkpoint(3)

    def is_stopped() -> bool:
        """Before each look three seconds pass; the person ends it once there is a line."""
        seen.let_pass(3.0)
        return bool(seen.lines)

    assert "was not copied" in await mirroring_of(run, "checkpoint.mirror_timeout_s=60").finish(is_stopped)
    assert [line for line in seen.lines if line.startswith("preparing")] == [
        f"preparing the copy to {run.url}: 0:03 so far",
        f"preparing the copy to {run.url}: stopped after 0:03",
    ]


async def test_a_store_that_cannot_be_written_costs_a_run_a_sentence_and_nothing_else(run: MirroredRun) -> None:
    run.checkpoint(3)
    run.bucket.parent.write_text("a file where the bucket should be")
    copies = mirroring_of(run, "checkpoint.mirror_timeout_s=0.5")
    with capture_logs() as logs:
        until(copies, lambda: (found := read_record(run.run_dir)) and found.state is MirrorState.FAILED and logs)
        left = await copies.finish(lambda: False)
    assert left.startswith(f"000001.version-3 was not copied to {run.url}: ")
    assert left.endswith("; there is no copy")
    assert [(line["event"], line["action"]) for line in logs] == [
        ("run_not_copied", "training goes on; it is tried again")
    ], "once, not at each try"


def test_a_copy_on_which_nothing_moves_is_ended_and_told(run: MirroredRun, mute: Path) -> None:
    run.checkpoint(3)
    copies = mirroring_of(run, "checkpoint.mirror_timeout_s=3.0")
    (run.run_dir / STAGING).mkdir()
    until(copies, lambda: (found := read_record(run.run_dir)) and found.state is MirrorState.FAILED)
    copies.close()
    found = read_record(run.run_dir)
    assert found is not None and found.reason == "nothing moved for 3 s, so it was ended"
    assert not (run.run_dir / STAGING).exists(), "links would hold room"


async def test_a_mute_store_holds_up_the_runs_end_no_longer_than_it_may(run: MirroredRun, mute: Path) -> None:
    run.checkpoint(3)
    copies = mirroring_of(run, "checkpoint.mirror_timeout_s=1.0")
    begun = time.monotonic()
    left = await copies.finish(lambda: False)
    assert time.monotonic() - begun < 30.0, "mute for ever"
    assert "was not copied" in left
    copies = mirroring_of(run, "checkpoint.mirror_timeout_s=300")
    assert "was not copied" in await copies.finish(lambda: True), "a second signal ends it at once"


def test_the_copying_process_ends_with_its_supervisor(run: MirroredRun, mute: Path) -> None:
    run.checkpoint(3)
    command = headrace.command("pipeline.training.mirror", str(run.run_dir), "a", "--take-over")
    process = subprocess.Popen(command, stdin=subprocess.PIPE)
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(30) == ExitCode.INTERRUPTED


async def test_no_credential_of_the_store_is_in_a_file_or_a_process_list(
    run: MirroredRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key-of-a-test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret-of-a-test")
    run.checkpoint(3)
    seen: list[bytes] = []
    popen = subprocess.Popen

    def watched(command: list[str], **given: Any) -> Any:
        seen.append(" ".join(command).encode())
        assert given["env"]["AWS_SECRET_ACCESS_KEY"], "this process alone needs it"
        return popen(command, **given)

    monkeypatch.setattr(subprocess, "Popen", watched)
    copies = mirroring_of(run)
    assert await copies.finish(lambda: False) == ""
    files = [path for path in run.folder.rglob("*") if path.is_file()]
    assert len(files) > 20 and seen
    assert not any(b"of-a-test" in text for text in seen)
    ours = {path for path in files if b"key-of-a-test" in path.read_bytes() or b"secret-of-a-test" in path.read_bytes()}
    assert ours == set()


def test_a_record_says_how_far_the_copy_is_and_why_there_is_none() -> None:
    copied = MirrorRecord(url="s3://b/op", copied="000001.version-3", copied_s=1000.0)
    assert copied.in_words(1300.0) == "copies at s3://b/op: 000001.version-3, 5 min ago"
    going = MirrorRecord(
        url="s3://b/op",
        state=MirrorState.COPYING,
        checkpoint="000002.version-6",
        started_s=1290.0,
        done_bytes=41_000_000,
        total_bytes=100_000_000,
    )
    assert going.in_words(1300.0) == (
        "copies at s3://b/op: none yet; copying 000002.version-6: 41 % of 100 MB, 4.1 MB/s"
    )
    failed = MirrorRecord(url="s3://b/op", state=MirrorState.FAILED, checkpoint="000002.version-6", reason="no answer")
    assert failed.in_words(0.0).endswith("000002.version-6 is not copied: no answer; it is tried again")


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
