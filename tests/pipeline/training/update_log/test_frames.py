"""Claims about the update log's files: an end that was cut off is known from damage, and neither is
ever read as data."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.training.update_log.frames import Scan, encode_frame, read_record, scan
from pipeline.training.update_log.records import Batch, End, Record, pack_units
from protocol.errors import DataError
from tests.pipeline.training.update_log.logs import start, units


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
    with pytest.raises(DataError, match="not the"):
        read_record(path, lying)
