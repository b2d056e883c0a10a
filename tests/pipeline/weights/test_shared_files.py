"""Claims about shared files: filled again only without readers, and never seen
half filled."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from pipeline.weights.shared_files import SharedFile, SharedFileReader, SharedFileWriter, UnnamedFile


def publish(writer: SharedFileWriter, path: Path, value: int, size: int = 5000) -> SharedFile:
    segment = writer.take(size)
    segment.data[:] = value
    segment.name(path)
    return segment


def inode(path: Path) -> int:
    return path.stat().st_ino


def test_a_file_that_nobody_reads_is_filled_again_and_a_reader_sees_the_new_bytes(tmp_path: Path) -> None:
    writer, reader = SharedFileWriter(tmp_path / "w"), SharedFileReader()
    first = publish(writer, tmp_path / "w" / "v1", 1)
    number = inode(first.path)
    mapped = reader.open(first.path)
    assert (mapped.data == 1).all()
    reader.release(mapped)
    writer.retire(first)
    second = publish(writer, tmp_path / "w" / "v2", 2)
    assert inode(second.path) == number
    assert (reader.open(second.path).data == 2).all()
    assert not (tmp_path / "w" / "v1").exists()


def test_a_file_that_somebody_reads_stays_as_it_is_until_it_is_released(tmp_path: Path) -> None:
    writer, reader = SharedFileWriter(tmp_path / "w"), SharedFileReader()
    first = publish(writer, tmp_path / "w" / "v1", 1)
    mapped = reader.open(first.path)
    writer.retire(first)
    second = publish(writer, tmp_path / "w" / "v2", 2)
    assert inode(second.path) != os.fstat(mapped.fd).st_ino
    assert (mapped.data == 1).all()
    assert Path(mapped.lasting_path).read_bytes() == b"\1" * 5000, "another process finds it still"
    reader.release(mapped)
    assert (reader.open(second.path).data == 2).all()


def test_a_reader_that_dies_releases_what_it_read(tmp_path: Path) -> None:
    writer, reader = SharedFileWriter(tmp_path / "w"), SharedFileReader()
    first = publish(writer, tmp_path / "w" / "v1", 1)
    number = inode(first.path)
    reader.open(first.path)
    # as the kernel closes the files of a process that ends
    reader.close()
    writer.retire(first)
    assert inode(publish(writer, tmp_path / "w" / "v2", 2).path) == number


def test_a_file_that_is_being_filled_again_is_not_there(tmp_path: Path) -> None:
    writer, reader = SharedFileWriter(tmp_path / "w"), SharedFileReader()
    first = publish(writer, tmp_path / "w" / "v1", 1)
    writer.retire(first)
    filling = writer.take(5000)
    with pytest.raises(FileNotFoundError):
        reader.open(tmp_path / "w" / "v1")
    with pytest.raises(FileNotFoundError, match="filled again"):
        reader.open(filling.path)


def test_what_a_reader_writes_into_its_mapping_reaches_nobody(tmp_path: Path) -> None:
    writer, reader = SharedFileWriter(tmp_path / "w"), SharedFileReader()
    first = publish(writer, tmp_path / "w" / "v1", 1)
    mapped = reader.open(first.path)
    mapped.data[:] = 9
    assert (first.data == 1).all()
    assert (SharedFileReader().open(first.path).data == 1).all()
    reader.forget(mapped)
    assert (reader.open(first.path).data == 1).all()


def test_another_size_makes_another_file(tmp_path: Path) -> None:
    writer = SharedFileWriter(tmp_path / "w")
    writer.retire(publish(writer, tmp_path / "w" / "v1", 1))
    assert publish(writer, tmp_path / "w" / "v2", 2, size=6000).path.stat().st_size == 6000
    assert [path.name for path in (tmp_path / "w").iterdir()] == ["v2"]


def test_a_disk_without_room_refuses_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = SharedFileWriter(tmp_path / "w")

    def full(fd: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(OSError, match="No space left"):
            writer.take(5000)
    assert list((tmp_path / "w").iterdir()) == []
    assert np.all(publish(writer, tmp_path / "w" / "v1", 3).data == 3)


def test_many_versions_keep_few_mappings(tmp_path: Path) -> None:
    writer, reader = SharedFileWriter(tmp_path / "w"), SharedFileReader()
    num_before = len(list(Path("/proc/self/fd").iterdir()))
    held = publish(writer, tmp_path / "w" / "v0", 0)
    serving = reader.open(held.path)
    for version in range(1, 30):
        newer = publish(writer, tmp_path / "w" / f"v{version}", version)
        staged = reader.open(newer.path)
        assert (staged.data == version).all()
        reader.release(serving)
        writer.retire(held)
        held, serving = newer, staged
    assert len(list(Path("/proc/self/fd").iterdir())) - num_before < 10
    assert len(list((tmp_path / "w").iterdir())) <= 2


def test_an_unnamed_file_can_be_mapped_until_closed_and_maps_outlive_it(
    tmp_path: Path,
) -> None:
    file = UnnamedFile(tmp_path / "own", 5000)
    assert list((tmp_path / "own").iterdir()) == []
    file.data[:] = 7
    path, kept = file.lasting_path, file.data
    read = [sys.executable, "-c", f"print(sum(open('{path}', 'rb').read()))"]
    assert subprocess.run(read, capture_output=True, text=True, timeout=60).stdout.strip() == "35000"
    file.close()
    assert not path.exists()
    assert (kept == 7).all()


def test_an_unnamed_file_that_finds_no_room_leaves_no_descriptor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    before = list(Path("/proc/self/fd").iterdir())
    with pytest.raises(OSError, match="No space"):
        UnnamedFile(tmp_path / "own", 5000)
    assert len(list(Path("/proc/self/fd").iterdir())) == len(before)
