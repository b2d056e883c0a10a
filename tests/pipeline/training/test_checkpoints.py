"""A checkpoint is whole or not there, and is checked before it is believed."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from pipeline.training.checkpoints import CheckpointFolder, choose_checkpoint, latest_checkpoint, read_checkpoint
from protocol.errors import ConfigError, DataError, Fenced, StorageFailed


def saving(text: str) -> Callable[[Path], None]:
    def save(folder: Path) -> None:
        (folder / "model").mkdir()
        (folder / "model" / "weights").write_text(text)
        (folder / "optimizer").write_text(text * 100)

    return save


def versions(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if not path.name.startswith((".writing-", ".lock")))


def held(root: Path, *, owner: str = "learner#1", keep: int = 2) -> CheckpointFolder:
    folder = CheckpointFolder(root, owner=owner, keep=keep)
    folder.take_over()
    return folder


def write_checkpoint(
    root: Path, version: int, save: Callable[[Path], None], state: dict[str, Any], *, keep: int = 2
) -> Path:
    """By an incarnation that takes the folder over for this one."""
    folder = held(root, keep=keep)
    try:
        return folder.write(version, save, state)
    finally:
        folder.close()


def test_what_is_written_is_what_is_read(tmp_path: Path) -> None:
    state = {"policy_version": 7, "claims": ["c1", "c2"], "history": {"rows": 40}}
    path = write_checkpoint(tmp_path / "checkpoints", 7, saving("seven"), state)
    found = latest_checkpoint(tmp_path / "checkpoints")
    assert found is not None
    assert (found.path, found.version, found.state) == (path, 7, state)
    assert (path / "model" / "weights").read_text() == "seven"


def test_a_root_that_is_not_there_holds_no_checkpoint(tmp_path: Path) -> None:
    assert latest_checkpoint(tmp_path / "never") is None


def test_the_newest_are_kept_and_the_older_removed(tmp_path: Path) -> None:
    for version in (10, 20, 30, 40):
        write_checkpoint(tmp_path, version, saving(str(version)), {}, keep=2)
    assert versions(tmp_path) == ["000003.version-30", "000004.version-40"]


def test_a_checkpoint_written_after_going_back_is_the_newest(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 30, saving("abandoned"), {}, keep=1)
    path = write_checkpoint(tmp_path, 25, saving("resumed"), {}, keep=1)
    found = latest_checkpoint(tmp_path)
    assert found is not None and found.path == path
    assert versions(tmp_path) == [path.name]


def flip_a_bit(folder: Path) -> Path:
    path = folder / "model" / "weights"
    data = bytearray(path.read_bytes())
    data[0] ^= 1
    path.write_bytes(data)
    return path


def cut_short(folder: Path) -> Path:
    path = folder / "optimizer"
    os.truncate(path, 3)
    return path


def lose_a_file(folder: Path) -> Path:
    path = folder / "model" / "weights"
    path.unlink()
    return path


def lose_the_manifest(folder: Path) -> Path:
    path = folder / "manifest.json"
    path.unlink()
    return path


def spoil_the_manifest(folder: Path) -> Path:
    path = folder / "manifest.json"
    path.write_bytes(path.read_bytes()[:-10])
    return path


def empty_the_manifest(folder: Path) -> Path:
    path = folder / "manifest.json"
    path.write_text('{"format": 1}')
    return path


def spoil_the_state(folder: Path) -> Path:
    path = folder / "state.json"
    path.write_bytes(b"\xff" + path.read_bytes()[1:])
    return path


DAMAGES = [
    flip_a_bit,
    cut_short,
    lose_a_file,
    lose_the_manifest,
    spoil_the_manifest,
    empty_the_manifest,
    spoil_the_state,
]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_taken(
    tmp_path: Path, damage: Callable[[Path], Path]
) -> None:
    before = write_checkpoint(tmp_path, 1, saving("one"), {"n": 1})
    newest = write_checkpoint(tmp_path, 2, saving("two"), {"n": 2})
    damaged = damage(newest)
    with pytest.raises(DataError, match=damaged.name):
        read_checkpoint(newest)
    with capture_logs() as logs:
        found = latest_checkpoint(tmp_path)
    assert found is not None and found.path == before and found.state == {"n": 1}
    assert [(entry["log_level"], entry["checkpoint"]) for entry in logs] == [("warning", str(newest))]
    assert str(damaged) in logs[0]["reason"]


def test_when_all_are_damaged_nothing_is_begun_anew(tmp_path: Path) -> None:
    folder = held(tmp_path)
    for path in [folder.write(version, saving("x"), {}) for version in (1, 2)]:
        flip_a_bit(path)
    with capture_logs() as logs, pytest.raises(DataError, match="none of the 2 checkpoints"):
        held(tmp_path, owner="learner#2")
    assert len(logs) == 2
    assert versions(tmp_path) == ["000001.version-1", "000002.version-2"], "nothing was moved"


def test_a_damaged_checkpoint_is_put_aside_and_never_pushes_an_intact_one_out(tmp_path: Path) -> None:
    folder = held(tmp_path)
    for version in (1, 2):
        path = folder.write(version, saving(str(version)), {})
    flip_a_bit(path)
    successor = CheckpointFolder(tmp_path, owner="learner#2", keep=2)
    found = successor.take_over()
    assert found is not None and found.version == 1
    assert versions(tmp_path) == ["000001.version-1", "damaged-000002.version-2"]
    successor.write(3, saving("three"), {})
    assert versions(tmp_path) == ["000001.version-1", "000003.version-3", "damaged-000002.version-2"]


def test_what_a_frozen_writer_finishes_after_its_successor_took_over_has_no_effect(tmp_path: Path) -> None:
    folder = held(tmp_path)
    before = folder.write(1, saving("one"), {})
    successor = CheckpointFolder(tmp_path, owner="learner#2", keep=2)

    def freeze(partial: Path) -> None:
        saving("two")(partial)
        # while this writer is in the middle
        found = successor.take_over()
        assert found is not None and found.path == before

    with pytest.raises(Fenced, match="learner#1 was not written"):
        folder.write(2, freeze, {})
    with pytest.raises(Fenced, match="learner#1 was not written"):
        folder.write(3, saving("three"), {})
    assert versions(tmp_path) == [before.name]
    assert successor.write(2, saving("two again"), {}).name == "000002.version-2"


def test_a_checkpoint_can_be_chosen_and_the_later_ones_are_set_aside(tmp_path: Path) -> None:
    folder = held(tmp_path, keep=3)
    for version in (10, 20, 30):
        folder.write(version, saving(str(version)), {"version": version})
    with pytest.raises(ConfigError, match="still writes"):
        choose_checkpoint(tmp_path, 20)
    folder.close()
    with pytest.raises(ConfigError, match="no checkpoint of version 15, only of 10, 20, 30"):
        choose_checkpoint(tmp_path, 15)
    assert choose_checkpoint(tmp_path, 20).name == "000002.version-20"
    assert versions(tmp_path) == ["000001.version-10", "000002.version-20", "set-aside-000003.version-30"]
    found = latest_checkpoint(tmp_path)
    assert found is not None and found.state == {"version": 20}
    assert held(tmp_path, owner="learner#2", keep=3).write(31, saving("31"), {}).name == "000004.version-31"


def test_a_damaged_checkpoint_cannot_be_chosen(tmp_path: Path) -> None:
    folder = held(tmp_path)
    for version in (10, 20):
        folder.write(version, saving("x"), {})
    folder.close()
    flip_a_bit(tmp_path / "000001.version-10")
    with pytest.raises(DataError, match="digest"):
        choose_checkpoint(tmp_path, 10)
    assert versions(tmp_path) == ["000001.version-10", "000002.version-20"]


def test_a_manifest_of_another_format_is_refused_by_name(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, 1, saving("one"), {})
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps(manifest | {"format": 99}))
    with pytest.raises(DataError, match="format 99, expected 1"):
        read_checkpoint(path)


def test_a_full_disk_keeps_the_old_checkpoint_and_says_so(tmp_path: Path) -> None:
    before = write_checkpoint(tmp_path, 1, saving("one"), {})

    def fill(folder: Path) -> None:
        (folder / "model").write_text("some of it")
        with Path("/dev/full").open("wb", buffering=0) as disk:
            disk.write(b"x")

    with pytest.raises(StorageFailed, match=r"version 2 .*No space left on device.*earlier checkpoints are intact"):
        write_checkpoint(tmp_path, 2, fill, {}, keep=1)
    found = latest_checkpoint(tmp_path)
    assert found is not None and found.path == before
    assert versions(tmp_path) == [before.name], "nothing of the failed write is left to fill the disk"


@contextmanager
def small_disk(folder: Path, num_bytes: int) -> Iterator[None]:
    """Let ``folder`` hold so many bytes, if this machine lets us mount; else let no file grow
    beyond so many."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs", str(folder)]
    if subprocess.run(mount, check=False, capture_output=True, timeout=20).returncode == 0:
        try:
            yield
        finally:
            subprocess.run(["umount", "-l", str(folder)], check=True, timeout=20)
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_keeps_the_old_checkpoint_and_takes_the_next_with_room(
    tmp_path: Path,
) -> None:
    root = tmp_path / "small"
    with small_disk(root, 1 << 16):
        folder = held(root)
        before = folder.write(1, saving("one"), {})
        with pytest.raises(StorageFailed, match=r"version 2 .*(No space left|File too large).*are intact"):
            folder.write(2, saving("x" * 1000), {})
        assert versions(root) == [before.name], "nothing of the failed write is left to fill the disk"
        found = latest_checkpoint(root)
        assert found is not None and found.path == before
        assert folder.write(3, saving("three"), {}).name == "000002.version-3"
        folder.close()


def test_a_save_that_raises_leaves_no_trace_and_its_own_error(tmp_path: Path) -> None:
    before = write_checkpoint(tmp_path, 1, saving("one"), {})

    def fail(folder: Path) -> None:
        (folder / "half").write_text("half")
        raise RuntimeError("the device is gone")

    with pytest.raises(RuntimeError, match="the device is gone"):
        write_checkpoint(tmp_path, 2, fail, {})
    assert versions(tmp_path) == [before.name]


KILLED_WRITER = """
import os, signal, sys
from pathlib import Path
from pipeline.training.checkpoints import CheckpointFolder

def save(folder):
    (folder / "half").write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)

folder = CheckpointFolder(Path(sys.argv[1]), owner="learner#1", keep=2)
folder.take_over()
folder.write(2, save, {})
"""


def test_a_writer_killed_in_the_middle_costs_nothing(tmp_path: Path) -> None:
    before = write_checkpoint(tmp_path, 1, saving("one"), {})
    done = subprocess.run([sys.executable, "-c", KILLED_WRITER, str(tmp_path)], check=False, timeout=60)
    assert done.returncode == -signal.SIGKILL
    assert list(tmp_path.glob(".writing-*/*/half")), "the writer died before it wrote anything"
    found = latest_checkpoint(tmp_path)
    assert found is not None and found.path == before
    after = write_checkpoint(tmp_path, 3, saving("three"), {})
    assert versions(tmp_path) == [before.name, after.name], "the leftover is swept by the next write"


def test_keeping_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least the checkpoint being written"):
        write_checkpoint(tmp_path, 1, saving("one"), {}, keep=0)


def test_a_spared_version_outlives_newer_checkpoints_and_is_no_place_to_resume(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    folder = held(root, keep=1)
    try:
        for version in (1, 2, 3):
            folder.spared = frozenset({1})
            folder.write(version, saving("x"), {})
        assert [name.rpartition("-")[2] for name in versions(root)] == ["1", "3"]
        folder.spared = frozenset()
        folder.write(4, saving("x"), {})
    finally:
        folder.close()
    assert [name.rpartition("-")[2] for name in versions(root)] == ["4"]
