"""Copies on a peer: a held snapshot stays as it is and holds up no learner; only whole, sealed and
newer ones count."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.training.snapshot_copies import (
    BYTES,
    OFFER,
    SEAL,
    HeldCopies,
    SnapshotCopy,
    SnapshotOffer,
    decoded,
    digest_of,
    is_own,
    sealed_copy,
    snapshot_secret,
)
from pipeline.training.snapshot_shelf import SnapshotShelf
from pipeline.training.snapshots import SnapshotFolder, read_told, sealed_manifests
from protocol.errors import DataError
from tests.manual_clock import ManualClock
from tests.pipeline.training.test_snapshots import live, versions, write, writer

SECRET = b"secret of this run's folder"
MANY = 1 << 30


def bytes_of(num: int) -> np.ndarray:
    return np.zeros(num, np.uint8)


def shelf_of(root: Path, clock: ManualClock | None = None) -> SnapshotShelf:
    return SnapshotShelf(root, lambda: SECRET, clock=(clock or ManualClock()).monotonic)


def offered(shelf: SnapshotShelf, known: str = "") -> SnapshotOffer | None:
    text, _ = shelf.answer(f"{OFFER}{known}", 0, MANY)
    return decoded(text, SnapshotOffer) if text else None


def sent(shelf: SnapshotShelf, offer: SnapshotOffer, part: int = 999) -> tuple[SnapshotCopy, np.ndarray]:
    """Return what a peer has after a transfer in parts of so many bytes."""
    data = b""
    while len(data) < offer.num_bytes:
        more, total = shelf.answer(f"{BYTES}{offer.id}", len(data), part)
        assert total == offer.num_bytes and more
        data += more
    text, _ = shelf.answer(f"{SEAL}{offer.id}", 0, MANY)
    return decoded(text, SnapshotCopy), np.frombuffer(data, np.uint8)


def made(root: Path, version: int, *, epoch: int = 1, run: str = "run") -> tuple[SnapshotCopy, np.ndarray]:
    """Return a copy of a snapshot of so many updates, as its host sealed it."""
    folder = writer(root, f"learner#{epoch}", run=run)
    write(folder, version)
    offer = offered(shelf_of(root))
    assert offer is not None
    return sent_at_once(root, offer)


def sent_at_once(root: Path, offer: SnapshotOffer) -> tuple[SnapshotCopy, np.ndarray]:
    [(path, _)] = [one for one in sealed_manifests(root) if one[1].decode() == offer.manifest]
    data = np.frombuffer(path.read_bytes(), np.uint8)
    return sealed_copy(offer, digest_of(data), SECRET), data


def test_a_peer_receives_the_newest_snapshot_in_parts_and_then_its_seal(tmp_path: Path) -> None:
    folder, shelf = writer(tmp_path), shelf_of(tmp_path)
    assert offered(shelf) is None
    for version in (1, 2):
        write(folder, version, claims={"c": [str(version)]})
    offer = offered(shelf)
    assert offer is not None and read_told(offer.manifest.encode()).version == 2
    copy, data = sent(shelf, offer)
    assert copy.digest == digest_of(data) and is_own(copy, SECRET)
    second = SnapshotFolder(tmp_path / "elsewhere", owner="learner#2", run="run")
    second.take_over()

    def put(path: Path) -> None:
        path.write_bytes(data.tobytes())

    taken = second.adopt(copy.manifest.encode(), "host b", put)
    assert taken is not None and taken.state == {"claims": {"c": ["2"]}}
    assert (second.read(taken).tensors["wide"][1] == 2).all()
    write(second, 3)
    assert [path.name for path in (tmp_path / "elsewhere").iterdir()] == ["learner#2"]


def test_a_copy_from_a_peer_that_finds_no_room_leaves_nothing_behind(tmp_path: Path) -> None:
    copy, data = made(tmp_path / "there", 2)
    second = SnapshotFolder(tmp_path / "here", owner="learner#2", run="run")
    second.take_over()

    def put(path: Path) -> None:
        path.write_bytes(data[: data.size // 2].tobytes())
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        second.adopt(copy.manifest.encode(), "host b", put)
    assert [path.name for path in (tmp_path / "here").iterdir()] == ["learner#2"]


def test_a_held_snapshot_stays_as_it_is_and_the_learner_fills_a_third_buffer(tmp_path: Path) -> None:
    folder, shelf = writer(tmp_path), shelf_of(tmp_path)
    write(folder, 1)
    offer = offered(shelf)
    assert offer is not None
    for version in range(2, 8):
        write(folder, version)
    copy, data = sent(shelf, offer)
    assert copy.told.version == 1 and (data[-4000:-1000] == 1).all()
    assert len(list(tmp_path.rglob("*.state"))) == 3
    shelf.close()
    found = SnapshotFolder(tmp_path, owner="learner#2", run="run").take_over()
    assert versions(found) == [7, 6, 1]


def test_a_snapshot_without_room_for_a_third_buffer_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, shelf = writer(tmp_path), shelf_of(tmp_path)
    write(folder, 1)
    assert offered(shelf) is not None
    write(folder, 2)

    def refuse(fd: int, offset: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.posix_fallocate", refuse)
        assert folder.fill(live(3)) is None
    shelf.close()
    write(folder, 4)
    assert [read_told(text).version for _, text in sealed_manifests(tmp_path)] == [4, 2]


def test_a_buffer_that_is_being_filled_is_never_offered(tmp_path: Path) -> None:
    folder = writer(tmp_path)
    for version in (1, 2):
        write(folder, version)
    assert folder.fill(live(3)) is not None
    offer = offered(shelf_of(tmp_path))
    assert offer is not None and read_told(offer.manifest.encode()).version == 2


async def test_a_peer_that_stops_asking_loses_its_hold_after_ten_seconds(tmp_path: Path) -> None:
    clock = ManualClock()
    folder, shelf = writer(tmp_path), shelf_of(tmp_path, clock)
    write(folder, 1)
    offer = offered(shelf)
    assert offer is not None
    write(folder, 2)
    await clock.advance(9.0)
    shelf.look()
    assert shelf.answer(f"{BYTES}{offer.id}", 0, 10)[0]
    await clock.advance(10.5)
    shelf.look()
    assert shelf.answer(f"{BYTES}{offer.id}", 0, 10) == (b"", 0)
    newer = offered(shelf)
    assert newer is not None and newer.id != offer.id


def test_a_succeeded_learners_snapshots_are_not_offered_any_more(tmp_path: Path) -> None:
    write(writer(tmp_path), 1)
    second = writer(tmp_path, "learner#2")
    assert offered(shelf_of(tmp_path)) is None
    write(second, 2)
    offer = offered(shelf_of(tmp_path))
    assert offer is not None and read_told(offer.manifest.encode()).epoch == 2


def test_only_bytes_that_were_sealed_are_kept(tmp_path: Path) -> None:
    copy, data = made(tmp_path, 1)
    held = HeldCopies(bytes_of)
    changed = data.copy()
    changed[1000] ^= 1
    for wrong in (changed, data[:-1]):
        with pytest.raises(DataError, match="other bytes"):
            held.keep(copy, wrong)
    assert not held.held
    held.keep(copy, data)
    assert held.newest_id == copy.id


def test_a_seal_is_of_this_runs_folder_and_of_these_bytes(tmp_path: Path) -> None:
    copy, _ = made(tmp_path, 1)
    secret = snapshot_secret(tmp_path)
    assert snapshot_secret(tmp_path) == secret and (tmp_path / ".snapshot-secret").stat().st_mode & 0o77 == 0
    assert is_own(copy, SECRET) and not is_own(copy, secret)
    forged = (
        msgspec.structs.replace(copy, manifest=copy.manifest.replace('"version":1', '"version":2')),
        msgspec.structs.replace(copy, digest="sha256:00"),
    )
    assert not any(is_own(one, SECRET) for one in forged)


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 5), st.sampled_from("ab")), max_size=12))
def test_the_newest_two_of_the_newest_incarnation_are_held(arrivals: list[tuple[int, int, str]]) -> None:
    held = HeldCopies(bytes_of)
    model: list[tuple[int, int, str]] = []
    for at, (epoch, updates, run) in enumerate(arrivals):
        told = {
            "format": 1, "run": run, "owner": f"learner#{epoch}", "version": updates, "num_updates": updates,
            "at_s": 0.0, "bytes": 8, "digest": "", "set_aside": 0, "note": "", "state": {},
        }  # fmt: skip
        data = held.place(8)
        data[:] = at
        offer = SnapshotOffer(str(at), msgspec.json.encode(told).decode(), 8, "")
        copy = sealed_copy(offer, digest_of(data), SECRET)
        model = [one for one in model if one[2] == run] if model and model[0][2] != run else model
        is_newer = not model or (epoch, updates) > model[0][:2]
        assert (held.why_not(copy.told) == "") is is_newer or not model
        if is_newer:
            held.keep(copy, data)
            model = [(epoch, updates, run), *model][:2]
        else:
            before = held.listed()
            with pytest.raises(DataError, match="not kept"):
                held.keep(copy, data)
            assert held.listed() == before
        assert [(one.copy.told.epoch, one.copy.told.num_updates, one.copy.told.run) for one in held.held] == model
        assert all((one.data == int(one.copy.id)).all() for one in held.held), "a held copy was written over"
        assert held.num_bytes <= 3 * 8
