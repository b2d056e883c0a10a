"""Claims about the learner's shelf: digests hold, old versions go, and other hosts receive the
versions that are there."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from pipeline.supervisor.leftovers import clear_leftovers
from pipeline.weights.digest import digest_file
from pipeline.weights.shared_files import SharedFileReader, UnnamedFile
from pipeline.weights.store import WeightsStore, weights_folder
from protocol.errors import ConfigError, UnknownMessage
from protocol.messages import BASE_VERSION, WeightsPart, WeightsRequest
from tests.pipeline.weights.versions import numbers, published, stepped
from tests.small_disk import small_disk

LARGEST = 4 << 20


@pytest.fixture
def store(tmp_path: Path) -> WeightsStore:
    return WeightsStore(tmp_path / "published", keep=2, max_part_bytes=LARGEST)


def test_a_published_file_has_the_digest_that_is_announced_and_nobody_may_write_it(store: WeightsStore) -> None:
    stored = store.publish(1, published(numbers(1)))
    announced = store.announcement(stored, endpoint="")
    path = Path(announced.path)
    assert announced.digest == digest_file(path)
    assert announced.num_bytes == path.stat().st_size
    assert path.stat().st_mode & 0o777 == 0o400
    assert stored.is_intact()
    stored.segment.data[-1] ^= 1
    assert not stored.is_intact()


def test_the_oldest_versions_and_those_of_an_earlier_learner_go(store: WeightsStore, tmp_path: Path) -> None:
    for version in range(1, 8):
        store.publish(version, published(numbers(version)))
    names = {path.name for path in (tmp_path / "published").glob("v*")}
    assert names == {"v00000006.safetensors", "v00000007.safetensors"}
    assert len(list((tmp_path / "published").iterdir())) == 3, "two versions, and one file to fill next"
    assert [store.held(version) is not None for version in (5, 6, 7)] == [False, True, True]
    WeightsStore(tmp_path / "published", keep=2, max_part_bytes=LARGEST)
    assert list((tmp_path / "published").iterdir()) == []


def test_the_base_of_adapters_is_kept_and_announced_with_each_version(store: WeightsStore, tmp_path: Path) -> None:
    base = store.publish(BASE_VERSION, published(numbers(0)))
    expected = store.announcement(base, endpoint="e")
    assert (expected.policy_version, expected.digest, expected.base) == (BASE_VERSION, base.digest, None)
    for version in range(1, 8):
        assert (
            store.announcement(store.publish(version, published(numbers(version, 100))), endpoint="e").base == expected
        )
    names = {path.name for path in (tmp_path / "published").glob("*.safetensors")}
    assert names == {"base.safetensors", "v00000006.safetensors", "v00000007.safetensors"}
    part = store.answer(WeightsRequest(version=BASE_VERSION, offset=0, max_bytes=1 << 22, base=7))
    assert (part.version, part.base, part.total_bytes) == (BASE_VERSION, -1, base.num_bytes)


@pytest.mark.parametrize("version", [BASE_VERSION, 1])
def test_a_file_published_again_replaces_the_damaged_one_and_leaks_no_descriptor(
    store: WeightsStore, version: int
) -> None:
    damaged = store.publish(version, published(numbers(1)))
    damaged.segment.data[-1] ^= 1
    again = store.publish(version, published(numbers(1)))
    assert again.path == damaged.path
    assert digest_file(again.path) == again.digest == damaged.digest
    assert store.held(version) is again
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(damaged.segment.fd)


def test_a_store_that_closes_keeps_no_descriptor_and_leaves_its_versions(store: WeightsStore, tmp_path: Path) -> None:
    made = [store.publish(version, published(numbers(version))) for version in range(1, 4)]
    store.close()
    for stored in made:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(stored.segment.fd)
    names = {path.name for path in (tmp_path / "published").iterdir()}
    assert names == {"v00000002.safetensors", "v00000003.safetensors"}
    assert store.held(3) is None
    store.close()


def test_a_version_that_a_generator_still_serves_is_not_written_over(store: WeightsStore) -> None:
    reader = SharedFileReader()
    mapped = reader.open(store.publish(1, published(numbers(1))).path)
    before = mapped.data.tobytes()
    for version in range(2, 9):
        store.publish(version, published(numbers(version)))
    assert mapped.data.tobytes() == before


def test_a_version_that_fails_while_it_is_written_leaves_nothing(store: WeightsStore, tmp_path: Path) -> None:
    whole = published(numbers(1))

    def failing():
        yield np.zeros(8, np.uint8)
        raise RuntimeError("the device went away")

    with pytest.raises(RuntimeError):
        store.publish(1, type(whole)(whole.head, whole.num_bytes, failing()))
    assert list((tmp_path / "published").iterdir()) == []


def test_a_request_for_a_version_or_range_not_held_gets_an_empty_part(store: WeightsStore) -> None:
    size = store.publish(1, published(numbers(1))).num_bytes
    wrong = [(2, 0, 10), (1, -1, 10), (1, size, 10), (1, 2**63, 10), (1, 0, 0)]
    for version, offset, max_bytes in wrong:
        part = store.answer(WeightsRequest(version=version, offset=offset, max_bytes=max_bytes))
        assert part.data.size == 0
        assert part.total_bytes == 0
    with pytest.raises(UnknownMessage, match="answers WeightsRequest only"):
        store.answer(WeightsPart(version=1, offset=0, total_bytes=0, data=np.zeros(0, np.uint8)))


def test_no_request_gets_a_larger_part_than_the_store_was_allowed(tmp_path: Path) -> None:
    store = WeightsStore(tmp_path / "published", keep=2, max_part_bytes=1000)
    stored = store.publish(1, published(numbers(1)))
    store.publish(2, published(stepped(numbers(1), 2)))
    part = store.answer(WeightsRequest(version=1, offset=100, max_bytes=1 << 40))
    assert part.data.tobytes() == stored.segment.data[100:1100].tobytes()
    delta = store.answer(WeightsRequest(version=2, offset=0, max_bytes=1 << 40, base=1))
    assert (delta.base, delta.data.size) == (1, 1000)


def test_a_holder_of_the_version_before_gets_a_delta_and_others_the_whole(store: WeightsStore) -> None:
    first = numbers(1)
    size = store.publish(1, published(first)).num_bytes
    store.publish(2, published(stepped(first, 2)))

    def offered(base: int, version: int = 2) -> tuple[int, int]:
        part = store.answer(WeightsRequest(version=version, offset=0, max_bytes=1 << 22, base=base))
        return part.base, part.total_bytes

    base, total = offered(1)
    assert base == 1
    assert total < size / 8
    for other in (-1, 0, 2, 7):
        assert offered(other) == (-1, size)
    store.publish(3, published(numbers(3)))
    assert offered(1, 3) == (-1, size), "it is no longer held"
    assert offered(2, 3) == (-1, size), "it is not worth it"


def test_each_run_has_a_folder_of_its_own_and_leaves_none(tmp_path: Path) -> None:
    assert weights_folder(tmp_path / "a", shared_memory=True) != weights_folder(tmp_path / "b", shared_memory=True)
    folder = weights_folder(tmp_path / "a", shared_memory=False)
    assert folder == tmp_path / "a" / "weights"
    WeightsStore(folder, keep=1, max_part_bytes=LARGEST).publish(1, published(numbers(1)))
    assert clear_leftovers(tmp_path / "a") == 1
    assert not folder.exists()


def test_a_weights_folder_of_another_user_is_refused_and_left_alone(tmp_path: Path) -> None:
    ours = tmp_path / "ours"
    ours.mkdir(mode=0o700)
    (ours / "precious").touch()
    (tmp_path / "link").symlink_to(ours)
    (tmp_path / "open").mkdir(mode=0o755)
    for folder in (tmp_path / "link", tmp_path / "open"):
        with pytest.raises(ConfigError, match="only you may enter"):
            WeightsStore(folder, keep=1, max_part_bytes=LARGEST)
    assert (ours / "precious").exists()


def test_versions_go_to_the_disk_once_memory_backed_storage_has_no_room(tmp_path: Path) -> None:
    """A container's /dev/shm of 64 MB; a write to a page without storage would kill the process."""
    with small_disk(tmp_path / "shm") as disk:
        store = WeightsStore(disk.folder / "run", keep=2, max_part_bytes=LARGEST, instead=tmp_path / "disk")
        base = store.publish(BASE_VERSION, published(numbers(0, 100)))
        stored = {version: store.publish(version, published(numbers(version))) for version in (1, 2)}
        assert {one.path.parent for one in stored.values()} == {disk.folder / "run"}
        disk.leave(1)
        for version in range(3, 7):
            stored[version] = store.publish(version, published(numbers(version, 50_000)))
            assert stored[version].path.parent == tmp_path / "disk"
            assert all(one.is_intact() for one in (base, stored[version]))
            read = SharedFileReader()
            assert digest_file(Path(store.announcement(stored[version], endpoint="").path)) == stored[version].digest
            read.close()
        assert [path.name for path in (disk.folder / "run").iterdir()] == ["base.safetensors"], (
            "old ones give room back"
        )
        assert sorted(path.name for path in (tmp_path / "disk").glob("v*")) == [
            "v00000005.safetensors",
            "v00000006.safetensors",
        ]
        assert isinstance(store.answer(WeightsRequest(version=6, offset=0, max_bytes=100, base=5)), WeightsPart)
        store.close()


def test_without_room_anywhere_the_error_is_that_of_the_last_folder(tmp_path: Path) -> None:
    with small_disk(tmp_path / "shm") as shm, small_disk(tmp_path / "full") as full:
        store = WeightsStore(shm.folder / "run", keep=1, max_part_bytes=LARGEST, instead=full.folder / "run")
        shm.leave(1)
        full.leave(1)
        with pytest.raises(OSError, match="No space left"):
            store.publish(1, published(numbers(1, 50_000)))
        with pytest.raises(OSError, match="No space left"):
            UnnamedFile.in_first_with_room([shm.folder / "f", full.folder / "f"], 1 << 20)
        merged = UnnamedFile.in_first_with_room([shm.folder / "f", tmp_path / "f"], 1 << 20)
        merged.data[:] = 1
        merged.close()
