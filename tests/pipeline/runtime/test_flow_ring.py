"""Claims about rings of flow records: nothing torn, nothing lost without being counted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from zlib import crc32

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.runtime.flow_ring import (
    MAX_NAMES,
    NUM_SLOTS,
    FlowRingReader,
    FlowRingWriter,
    LinkSide,
    LinkState,
    flow_folder,
)
from pipeline.runtime.message_record import MessageOutcome, key_of
from pipeline.supervisor.leftovers import clear_leftovers, remains
from protocol.ids import Incarnation, Role
from tests.pipeline.runtime.ring_records import Ended, chunk_id, read
from tests.pipeline.runtime.ring_records import write as write_record

ROOT = Path(__file__).parents[3]
WHO = Incarnation(Role.REWARD, "reward-0", 1)
SLOTS_AT = 128 + MAX_NAMES * 80


def completion(number: int) -> Ended:
    """A record whose fields all follow from ``number``: a mixture of two shows."""
    whole = float(number % 4096)
    return Ended(
        float(number), f"generator-{number % 7}>reward-0", MessageOutcome(1 + number % 4), key_of(chunk_id(number)),
        number, whole, 2 * whole, 3 * whole, number % 1000,
    )  # fmt: skip


def state(number: int) -> LinkState:
    counts = (number * 3, number * 2, number)
    return LinkState(float(number), "", LinkSide(1 + number % 3), counts, number, float(number % 4096), number % 1000)


def record(number: int) -> Ended | LinkState:
    return state(number) if number % 3 == 0 else completion(number)


def write(writer: FlowRingWriter, number: int) -> None:
    write_record(writer, record(number), number)


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[FlowRingWriter]:
    with closing(FlowRingWriter(tmp_path / "flow", WHO)) as made:
        yield made


@pytest.fixture
def reader(writer: FlowRingWriter) -> Iterator[FlowRingReader]:
    with closing(FlowRingReader(writer.path)) as made:
        yield made


def test_records_come_back_as_they_were_written(writer: FlowRingWriter, reader: FlowRingReader) -> None:
    assert read(reader) == []
    for number in range(100):
        write(writer, number)
    assert read(reader) == [record(number) for number in range(100)]
    assert reader.path.stat().st_mode & 0o077 == reader.path.parent.stat().st_mode & 0o077 == 0


@settings(max_examples=12, deadline=None)
@given(st.lists(st.integers(0, NUM_SLOTS + 200), max_size=4))
def test_read_and_overwritten_add_up_to_what_was_written(turns: list[int]) -> None:
    with (
        tempfile.TemporaryDirectory() as folder,
        closing(FlowRingWriter(Path(folder) / "flow", WHO)) as writer,
        closing(FlowRingReader(writer.path)) as reader,
    ):
        read(reader)
        written = 0
        for number in turns:
            for _ in range(number):
                write(writer, written)
                written += 1
            newest = range(written - min(number, NUM_SLOTS), written)
            assert read(reader) == [record(n) for n in newest], "the newest, in order"
        assert reader.num_read + reader.num_overwritten == written
        assert reader.num_damaged == 0


def start(folder: Path, epoch: int, count: int) -> subprocess.Popen[bytes]:
    """Write ``count`` records in another process, as fast as it can."""
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from pipeline.runtime.flow_ring import FlowRingWriter\n"
        "from protocol.ids import Incarnation, Role\n"
        "from tests.pipeline.runtime.test_flow_ring import write\n"
        "folder, epoch, count = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])\n"
        "writer = FlowRingWriter(folder, Incarnation(Role.REWARD, 'reward-0', epoch))\n"
        "print('ready', flush=True)\n"
        "for number in range(count):\n"
        "    write(writer, number)\n"
        "print('done', flush=True)\n"
        "sys.stdin.read()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(folder), str(epoch), str(count)],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None and process.stdout.readline() == b"ready\n"
    return process


def check(found: list[Ended | LinkState], last: float) -> float:
    """Assert that each is a whole record, and newer than the one before; return the last."""
    for one in found:
        number = int(one.at_s)
        assert one == record(number), "a mixture of two records"
        assert one.at_s > last
        last = one.at_s
    return last


@pytest.mark.parametrize("is_late", [False, True])
def test_a_reader_of_a_ring_that_is_being_written_never_returns_a_torn_record(tmp_path: Path, is_late: bool) -> None:
    """It reads what has just been written, or comes when its slots are being filled anew."""
    count = 40_000
    process = start(tmp_path / "flow", 1, count)
    try:
        with closing(FlowRingReader(tmp_path / "flow" / "reward-0.ring")) as reader:
            last, deadline = -1.0, time.monotonic() + 60.0
            while last < count - 1:
                last = check(read(reader), last)
                assert time.monotonic() < deadline
                while is_late and not is_overtaken(reader, count):
                    assert time.monotonic() < deadline
                    time.sleep(0.001)
            assert reader.num_read + reader.num_overwritten == count
            assert reader.num_damaged == 0
            assert reader.num_overwritten > 0 or not is_late, "the reader was to be overtaken"
    finally:
        process.communicate(timeout=30.0)


def is_overtaken(reader: FlowRingReader, count: int) -> bool:
    """Whether the writer has filled a slot anew that is not read, or has written ``count``."""
    assert reader._fd is not None
    return reader._written(reader._fd) >= min(count, reader._next + NUM_SLOTS + 1)


def test_a_killed_writers_records_are_read_and_its_successors_follow(tmp_path: Path) -> None:
    first = start(tmp_path / "flow", 1, 10_000_000)
    with closing(FlowRingReader(tmp_path / "flow" / "reward-0.ring")) as reader:
        last = -1.0
        while reader.num_read < 1_000:
            last = check(read(reader), last)
        first.send_signal(signal.SIGKILL)
        first.communicate(timeout=30.0)
        unread = True
        while unread:
            unread = bool(read(reader))
        total = reader.num_read + reader.num_overwritten
        assert read(reader) == [] and reader.num_damaged == 0
        second = start(tmp_path / "flow", 2, 500)
        assert second.stdout is not None and second.stdout.readline() == b"done\n"
        assert read(reader) == [record(number) for number in range(500)]
        assert reader.num_read + reader.num_overwritten == total + 500
        second.communicate(timeout=30.0)


def test_what_a_writer_left_is_read_before_its_successors_records(tmp_path: Path) -> None:
    first = FlowRingWriter(tmp_path / "flow", WHO)
    with closing(FlowRingReader(first.path)) as reader:
        write(first, 1)
        assert read(reader) == [record(1)]
        write(first, 2)
        first.close()
        with closing(FlowRingWriter(tmp_path / "flow", Incarnation(Role.REWARD, "reward-0", 2))) as second:
            write(second, 7)
            assert read(reader) == [record(2), record(7)]


def test_a_damaged_slot_is_left_out_and_counted(writer: FlowRingWriter, reader: FlowRingReader) -> None:
    read(reader)
    for number in range(10):
        write(writer, number)
    with writer.path.open("r+b") as file:
        for slot, byte in ((2, 0), (4, 20), (6, 57)):
            file.seek(SLOTS_AT + 64 * slot + byte)
            found = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([found[0] ^ 0xFF]))
    assert read(reader) == [record(number) for number in range(10) if number not in (2, 4, 6)]
    assert (reader.num_read, reader.num_overwritten, reader.num_damaged) == (7, 0, 3)


def test_a_later_record_is_not_taken_for_the_one_that_was_in_its_slot(
    writer: FlowRingWriter, reader: FlowRingReader
) -> None:
    for number in range(3):
        write(writer, number)
    with writer.path.open("r+b") as file:
        # whole, and written after the reader has looked at the number of records
        file.seek(SLOTS_AT + 64 + 8)
        body = file.read(48)
        sequence = (NUM_SLOTS + 2).to_bytes(8, "little")
        file.seek(SLOTS_AT + 64)
        file.write(sequence + body + crc32(body, crc32(sequence)).to_bytes(4, "little"))
    assert read(reader) == [record(0), record(2)]


def test_records_of_kinds_that_a_later_version_has_are_left_out_and_counted(
    writer: FlowRingWriter, reader: FlowRingReader
) -> None:
    kind, outcome, side = 0, 1, 1
    for number, (make, at) in enumerate(((completion, kind), (completion, outcome), (state, side))):
        write(writer, number)
        slot = SLOTS_AT + 64 * (2 * number + 1)
        write_record(writer, make(number), number)
        with writer.path.open("r+b") as file:
            file.seek(slot)
            sequence, body = file.read(8), bytearray(file.read(48))
            body[at] = 99
            file.seek(slot + 8)
            file.write(bytes(body) + crc32(body, crc32(sequence)).to_bytes(4, "little"))
    assert read(reader) == [record(number) for number in range(3)]
    assert (reader.num_overwritten, reader.num_damaged) == (0, 3)


def test_a_slot_that_is_being_filled_anew_is_overwritten_and_not_damaged(
    writer: FlowRingWriter, reader: FlowRingReader
) -> None:
    for number in range(NUM_SLOTS):
        write(writer, number)
    with writer.path.open("r+b") as file:
        # half of the next record, as the writer leaves it between two of its writes
        file.seek(SLOTS_AT + 8)
        file.write(b"\x55" * 20)
    assert read(reader) == [record(number) for number in range(1, NUM_SLOTS)]
    assert (reader.num_overwritten, reader.num_damaged) == (1, 0)


def test_a_cut_file_ends_no_reader(writer: FlowRingWriter, reader: FlowRingReader) -> None:
    for number in range(10):
        write(writer, number)
    assert len(read(reader)) == 10
    os.truncate(writer.path, 300)
    assert read(reader) == []


@pytest.mark.parametrize("content", [b"", b"no ring", b"\0" * 1_000_000])
def test_a_file_that_is_no_ring_is_counted_once_and_one_in_its_place_is_read(tmp_path: Path, content: bytes) -> None:
    folder = tmp_path / "flow"
    folder.mkdir(mode=0o700)
    path = folder / "reward-0.ring"
    path.write_bytes(content)
    with closing(FlowRingReader(path)) as reader:
        assert [read(reader), read(reader)] == [[], []]
        assert reader.num_damaged == 1
        with closing(FlowRingWriter(folder, WHO)) as writer:
            write(writer, 3)
            assert read(reader) == [record(3)]


def test_links_beyond_the_table_of_names_have_none(writer: FlowRingWriter, reader: FlowRingReader) -> None:
    for number in range(MAX_NAMES + 2):
        write_record(writer, Ended(0.0, f"g-{number}>r"))
    named = [one.link for one in read(reader)]
    assert named == [*(f"g-{number}>r" for number in range(MAX_NAMES)), "", ""]


def test_a_folder_without_room_is_an_error_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, offset: int, length: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space"):
        FlowRingWriter(tmp_path / "flow", WHO)
    assert list((tmp_path / "flow").iterdir()) == []


def test_both_ends_of_a_link_name_a_chunk_by_the_same_number() -> None:
    assert key_of(chunk_id(1)) == key_of(chunk_id(1)) != key_of(chunk_id(2))
    assert 0 <= key_of(None) < 2**64


def test_a_runs_rings_are_removed_with_its_other_leftovers(tmp_path: Path) -> None:
    folder = flow_folder(tmp_path)
    with closing(FlowRingWriter(folder, WHO)):
        assert folder in remains(tmp_path)
        clear_leftovers(tmp_path)
        assert not folder.exists()
