"""A snapshot is whole or refused by name, and one incarnation writes at a time."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from pipeline.training.live_states import BufferPages, LiveState
from pipeline.training.snapshots import SnapshotFolder, StateSnapshot
from pipeline.weights.tensorfile import TensorSpec
from protocol.errors import ConfigError, DataError

SIZE = 5000


def live(value: int, size: int = SIZE) -> LiveState:
    def copy(pages: BufferPages) -> None:
        pages.arrays[0][:] = value
        pages.arrays[1][:] = value + 1

    return LiveState((TensorSpec("wide", "F32", (size // 4,)), TensorSpec("bytes", "U8", (7,))), f"note {value}", copy)


def writer(root: Path, owner: str = "learner#1", *, run: str = "run", set_aside: int = 0) -> SnapshotFolder:
    folder = SnapshotFolder(root, owner=owner, run=run, set_aside=set_aside)
    folder.take_over()
    return folder


def write(folder: SnapshotFolder, version: int, *, size: int = SIZE, **state: Any) -> None:
    filled = folder.fill(live(version, size))
    folder.seal(filled, version=version, num_updates=version, state=state)


def successor(
    root: Path, owner: str = "learner#2", **told: Any
) -> tuple[SnapshotFolder, list[StateSnapshot], list[str]]:
    """Return the next incarnation's folder, the snapshots that it found, and the reasons of
    refusals."""
    folder = SnapshotFolder(root, owner=owner, **{"run": "run", **told})
    with capture_logs() as logs:
        found = folder.take_over()
    return folder, found, [line["reason"] for line in logs if line["event"] == "snapshot refused"]


def versions(found: list[StateSnapshot]) -> list[int]:
    return [snapshot.manifest.version for snapshot in found]


def test_a_successor_finds_the_two_newest_and_reads_what_was_there(tmp_path: Path) -> None:
    first = writer(tmp_path)
    for version in (1, 2, 3):
        write(first, version, claims={"c": [f"{version}"]})
    second, found, _ = successor(tmp_path)
    assert versions(found) == [3, 2]
    assert (found[0].name, found[0].state) == ("snapshot of version 3 by learner#1", {"claims": {"c": ["3"]}})
    kept = second.read(found[0])
    assert kept.note == "note 3"
    spec, data = kept.tensors["wide"]
    assert (spec.dtype, spec.shape) == ("F32", (SIZE // 4,))
    assert data.size == SIZE and (data == 3).all() and (kept.tensors["bytes"][1] == 4).all()


def test_buffers_are_allocated_once_while_the_state_keeps_its_size(tmp_path: Path) -> None:
    folder = writer(tmp_path)
    write(folder, 1)
    write(folder, 2)
    before = {path.name: path.stat().st_ino for path in tmp_path.rglob("*.state")}
    for version in range(3, 9):
        write(folder, version)
    assert {path.name: path.stat().st_ino for path in tmp_path.rglob("*.state")} == before
    assert len(before) == 2
    write(folder, 9, size=2 * SIZE)
    assert versions(successor(tmp_path)[1]) == [9, 8]


def test_a_buffer_is_no_snapshot_while_it_is_filled_and_the_one_before_stays(tmp_path: Path) -> None:
    folder = writer(tmp_path)
    for version in (1, 2):
        write(folder, version)
    folder.fill(live(3))
    _, found, refused = successor(tmp_path)
    assert versions(found) == [2]
    assert refused == ["its writer died while writing it"]


@pytest.mark.parametrize("place", [-1, 100, "cut", "manifest"])
def test_a_damaged_snapshot_is_refused_and_the_one_before_is_read(tmp_path: Path, place: int | str) -> None:
    folder = writer(tmp_path)
    for version in (1, 2):
        write(folder, version)
    damaged = tmp_path / "learner#1" / ("b.json" if place == "manifest" else "b.state")
    if place == "cut":
        os.truncate(damaged, damaged.stat().st_size - 1)
    else:
        data = bytearray(damaged.read_bytes())
        data[place if isinstance(place, int) else 5] ^= 1
        damaged.write_bytes(data)
    second, found, refused = successor(tmp_path)
    if place == "manifest":
        assert "does not match its digest" in refused[0]
    else:
        with pytest.raises(DataError, match=r"b\.state has"):
            second.read(found[0])
        second.refuse(found.pop(0), "damaged")
    assert not list(tmp_path.rglob("b.*")), "it is removed, with its manifest"
    assert versions(found) == [1]
    assert (second.read(found[0]).tensors["wide"][1] == 1).all()


@pytest.mark.parametrize(
    ("told", "reason"), [({"run": "other"}, "another run"), ({"set_aside": 4}, "an older checkpoint was chosen")]
)
def test_a_snapshot_of_another_run_or_an_abandoned_branch_is_refused(
    tmp_path: Path, told: dict[str, Any], reason: str
) -> None:
    write(writer(tmp_path, set_aside=3), 1)
    _, found, refused = successor(tmp_path, **told)
    assert not found
    assert len(refused) == 1 and reason in refused[0]
    assert not list(tmp_path.rglob("*.state"))


def test_a_stale_incarnation_neither_changes_nor_seals_once_it_is_succeeded(tmp_path: Path) -> None:
    stale = writer(tmp_path)
    for version in (1, 2):
        write(stale, version)
    filled = stale.fill(live(3))
    second, found, _ = successor(tmp_path)
    with pytest.raises(OSError):
        stale.seal(filled, version=3, num_updates=3, state={})
    # the next one's buffer is sealed, so it must not be filled
    stale._newest = "a"
    with pytest.raises(OSError):
        stale.fill(live(4))
    assert (second.read(found[0]).tensors["wide"][1] == 2).all()
    write(second, 5)
    assert versions(successor(tmp_path, "learner#3")[1]) == [5]


def test_the_predecessors_snapshots_stay_until_the_successor_has_its_own(tmp_path: Path) -> None:
    write(writer(tmp_path), 1)
    second, found, _ = successor(tmp_path)
    assert versions(found) == [1]
    second.fill(live(2))
    third, found, _ = successor(tmp_path, "learner#3")
    assert versions(found) == [1], "learner#2 ended before it had sealed one"
    write(third, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["learner#3"]


def test_snapshots_are_for_their_user_alone(tmp_path: Path) -> None:
    root = tmp_path / "snapshots"
    write(writer(root), 1)
    for path in (root, *root.rglob("*")):
        if path.is_dir() or path.suffix == ".state":
            assert not stat.S_IMODE(path.stat().st_mode) & 0o077, path
    root.chmod(0o755)
    with pytest.raises(ConfigError, match="chmod 700"):
        writer(root, "learner#2")


def test_a_state_without_room_leaves_no_file_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, offset: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    folder = writer(tmp_path)
    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(OSError, match="No space"):
        folder.fill(live(1))
    assert not list(tmp_path.rglob("*.state"))
