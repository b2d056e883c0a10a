"""Claims about the update log's folder: it can be read after a learner's death, and lost files are
noticed."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.training.update_log.folder import LogWriter, Scan, encode_frame, read_log, read_record, scan
from pipeline.training.update_log.records import Batch, End, Origin, Record, pack_units
from protocol.errors import DataError
from tests.pipeline.training.update_log.logs import append_update, one_segment, start, units
from tests.protocol.samples import same


def test_updates_come_back_with_their_units_in_order(tmp_path: Path) -> None:
    one_segment(tmp_path)
    [segment] = read_log(tmp_path)
    assert segment.is_whole
    assert [update.batch.update for update in segment.updates] == [1, 2, 3]
    for update in segment.updates:
        expected = units(update.batch.update)
        assert update.outcome is not None and update.outcome.update == update.batch.update
        assert [unit.name for unit in update.units()] == [unit.name for unit in expected]
        for one, other in zip(expected, update.units(), strict=True):
            first, second = one.trajectories[0][0].chunk, other.trajectories[0][0].chunk
            assert same(first.tokens, second.tokens) and same(first.behavior_logprobs, second.behavior_logprobs)


def test_a_learner_that_died_at_any_byte_leaves_its_updates_up_to_there(tmp_path: Path) -> None:
    path = one_segment(tmp_path / "whole", sealed=False)
    data = path.read_bytes()
    counts: list[int] = []
    for cut in range(0, len(data), 37):
        folder = tmp_path / str(cut)
        folder.mkdir()
        (folder / path.name).write_bytes(data[:cut])
        segments = read_log(folder)
        made = [update for segment in segments for update in segment.updates if update.outcome]
        assert [update.batch.update for update in made] == list(range(1, len(made) + 1))
        assert all(len(update.units()) == 2 for update in made)
        assert not any(segment.is_whole for segment in segments)
        counts.append(len(made))
    assert counts == sorted(counts) and set(counts) == {0, 1, 2}


def test_units_that_were_never_written_are_missed_by_number(tmp_path: Path) -> None:
    writer = LogWriter(tmp_path, epoch=1)
    writer.begin(start("v0"))
    append_update(writer, 1, state=None)
    writer.close()
    path = next(tmp_path.iterdir())
    path.write_bytes(path.read_bytes()[:-1])
    [segment] = read_log(tmp_path)
    with pytest.raises(DataError, match="has 0 of its 2 units"):
        segment.updates[0].units()


def test_a_sealed_segment_is_followed_by_the_next_and_a_new_learner_begins_its_own(tmp_path: Path) -> None:
    writer = LogWriter(tmp_path, epoch=1)
    writer.begin(start("v0"))
    append_update(writer, 1)
    writer.seal()
    # nothing is open: nothing happens
    writer.seal()
    assert (writer.next_segment, writer.is_open) == (2, False)
    writer.begin(start("v1", num_updates=1, origin=Origin.CONTINUED))
    append_update(writer, 2)
    writer.close()
    other = LogWriter(tmp_path, epoch=4)
    other.begin(start("v1", num_updates=1, version=5, origin=Origin.CHECKPOINT, checkpoint="000001.version-1"))
    other.close()
    assert [(s.path.name, s.epoch, s.is_whole) for s in read_log(tmp_path)] == [
        ("000001.epoch-1.log", 1, True),
        ("000002.epoch-1.log", 1, False),
        ("000003.epoch-4.log", 4, False),
    ]


def test_a_segment_that_lost_its_end_is_refused_when_its_learner_went_on(tmp_path: Path) -> None:
    writer = LogWriter(tmp_path, epoch=1)
    writer.begin(start("v0"))
    append_update(writer, 1)
    writer.seal()
    writer.begin(start("v1", num_updates=1, origin=Origin.CONTINUED))
    writer.seal()
    first = tmp_path / "000001.epoch-1.log"
    first.write_bytes(first.read_bytes()[:-20])
    with pytest.raises(DataError, match=r"000001\.epoch-1\.log is missing its end"):
        read_log(tmp_path)


def test_a_segment_that_the_disk_cut_off_is_tolerated_when_its_learner_said_so(tmp_path: Path) -> None:
    writer = LogWriter(tmp_path, epoch=1)
    writer.begin(start("v0"))
    append_update(writer, 1, state=None)
    writer.close()
    writer.begin(start("v4", num_updates=4, origin=Origin.AFTER_FAILURE))
    writer.seal()
    assert [segment.is_whole for segment in read_log(tmp_path)] == [False, True]


def test_the_log_is_trimmed_of_its_oldest_segments(tmp_path: Path) -> None:
    writer = LogWriter(tmp_path, epoch=1)
    for number in range(4):
        writer.begin(start(f"v{number}", num_updates=number, origin=Origin.CONTINUED))
        append_update(writer, number + 1)
        writer.seal()
    total = sum(path.stat().st_size for path in tmp_path.iterdir())
    assert writer.num_bytes == total
    assert [writer.trim(0), writer.trim(3), writer.trim(3)] == [0, 2, 0]
    assert writer.num_bytes < total
    assert sorted(path.name[:6] for path in tmp_path.iterdir()) == ["000003", "000004"]


@pytest.mark.parametrize("exists", [True, False])
def test_a_run_without_a_log_is_told_how_to_get_one(tmp_path: Path, exists: bool) -> None:
    folder = tmp_path / "updates"
    if exists:
        folder.mkdir()
    with pytest.raises(
        DataError, match=r"holds no update log; it is written from the first update on if replay\.record is on"
    ):
        read_log(folder)


def test_another_format_is_refused(tmp_path: Path) -> None:
    import msgspec

    writer = LogWriter(tmp_path, epoch=1)
    writer.begin(msgspec.structs.replace(start("v0"), format=99))
    writer.close()
    with pytest.raises(DataError, match="has format 99"):
        read_log(tmp_path)


@cache
def records() -> list[Record]:
    batch = Batch(update=1, policy_version=0, claim="c", units=("0", "1"), at_s=1.5)
    return [start("v0"), batch, *pack_units(units()), End(num_records=3)]


@cache
def whole() -> bytes:
    return b"".join(encode_frame(record) for record in records())


def ends() -> list[int]:
    found = [0]
    for record in records():
        found.append(found[-1] + len(encode_frame(record)))
    return found


def scanned(data: bytes) -> tuple[Scan, list[Record]]:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "log"
        path.write_bytes(data)
        found = scan(path)
        return found, [read_record(path, frame) for frame in found.frames]


def test_records_come_back_as_they_were_written() -> None:
    found, back = scanned(whole())
    assert back == records()
    assert found.num_torn_bytes == 0


def test_an_empty_file_holds_nothing() -> None:
    assert scanned(b"") == (Scan((), 0), [])


@settings(deadline=None)
@given(cut=st.integers(0, 10**9), tail=st.sampled_from([b"", b"\0" * 40, b"\xf5HUL", b"\xf5HUL" + b"\0" * 60]))
def test_wherever_a_crash_cuts_the_file_the_whole_records_before_are_there(cut: int, tail: bytes) -> None:
    place = cut % len(whole())
    found, back = scanned(whole()[:place] + tail)
    expected = [record for record, end in zip(records(), ends()[1:], strict=True) if end <= place]
    assert back == expected
    assert found.num_torn_bytes == place + len(tail) - ends()[len(expected)]


@settings(deadline=None)
@given(place=st.integers(0, 10**9), flip=st.integers(1, 255))
def test_a_changed_byte_is_refused_or_ends_the_log_and_is_never_read(place: int, flip: int) -> None:
    data = bytearray(whole())
    place %= len(data)
    data[place] ^= flip
    if place < ends()[-2]:
        with pytest.raises(DataError, match=f"damaged at byte {max(end for end in ends() if end <= place)}"):
            scanned(bytes(data))
    else:
        found, back = scanned(bytes(data))
        assert back == records()[:-1]
        assert found.num_torn_bytes == len(data) - ends()[-2]


@settings(deadline=None)
@given(first=st.integers(0, 10**9), second=st.integers(0, 10**9))
def test_a_part_that_is_missing_from_the_middle_is_refused(first: int, second: int) -> None:
    low, high = sorted((first % ends()[-2], second % ends()[-2]))
    if low == high or (low in ends() and high in ends()):
        # the reader of the records notices missing whole records, not this one
        return
    with pytest.raises(DataError, match="damaged"):
        scanned(whole()[:low] + whole()[high:])


@settings(deadline=None)
@given(st.binary(max_size=300))
def test_any_bytes_are_read_without_a_crash(data: bytes) -> None:
    found, back = scanned(data)
    assert (back, found.num_torn_bytes) == ([], len(data))


def test_a_file_that_changes_after_it_was_checked_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(whole())
    frame = scan(path).frames[1]
    data = bytearray(whole())
    data[frame.end - 1] ^= 1
    path.write_bytes(data)
    with pytest.raises(DataError, match="has changed"):
        read_record(path, frame)


def test_a_record_that_unpacks_to_more_than_its_header_tells_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(whole())
    frame = scan(path).frames[2]
    lying = type(frame)(frame.kind, frame.offset, frame.stored_bytes, frame.record_bytes - 1, frame.checksum)
    with pytest.raises(DataError, match="does not have the"):
        read_record(path, lying)
