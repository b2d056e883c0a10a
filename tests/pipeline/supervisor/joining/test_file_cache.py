"""Claims about the file cache: its files are whole, and a damaged one is fetched again."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.supervisor.joining import file_fetch
from pipeline.supervisor.joining.file_fetch import CachedFileBusy, CachedFileDamaged, FileCache, FileServer, fetch_files
from pipeline.supervisor.joining.manifest import ManifestFile
from protocol.errors import ConfigError, StorageFailed, UnknownMessage
from protocol.ids import Role
from protocol.messages import FileRequest, Message, WeightsRequest
from tests.driven_progress import DrivenProgress
from tests.small_disk import small_disk

CONTENT = bytes(range(256)) * 40


def described(content: bytes) -> ManifestFile:
    digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
    return ManifestFile(place="model/config.json", num_bytes=len(content), digest=digest, roles=(Role.GENERATOR,))


class Source:
    """A file server without a wire, which counts the bytes that it sends."""

    def __init__(self, path: Path) -> None:
        self.server = FileServer({described(CONTENT).digest: path}, max_part_bytes=1000)
        self.num_bytes = 0
        self.before_each: Callable[[], None] = lambda: None

    async def request(self, message: Message, *, timeout_s: float, unreached_s: float | None = None) -> Message:
        self.before_each()
        part = await self.server.answer_later(message)
        self.num_bytes += part.data.size
        return part

    def unreached_s(self) -> float:
        return 0.0

    def close(self) -> None: ...


@pytest.fixture
def cache(tmp_path: Path) -> FileCache:
    return FileCache(tmp_path / "cache")


@pytest.fixture
def source(tmp_path: Path) -> Source:
    (tmp_path / "config.json").write_bytes(CONTENT)
    return Source(tmp_path / "config.json")


async def fetched(cache: FileCache, source: Source) -> Path:
    file = described(CONTENT)
    return (await fetch_files([file, file], cache, source, "tcp://there:1", max_part_bytes=5000))[file.digest]


async def test_a_file_is_fetched_once_for_all_runs_and_is_read_only(cache: FileCache, source: Source) -> None:
    path = await fetched(cache, source)
    assert path.read_bytes() == CONTENT and path.stat().st_mode & 0o777 == 0o400
    assert await fetched(cache, source) == path
    assert source.num_bytes == len(CONTENT)


async def test_a_damaged_file_of_the_cache_is_fetched_again(cache: FileCache, source: Source) -> None:
    path = await fetched(cache, source)
    path.chmod(0o600)
    path.write_bytes(CONTENT[:-1] + b"!")
    assert (await fetched(cache, source)).read_bytes() == CONTENT
    assert source.num_bytes == 2 * len(CONTENT)


async def test_a_half_copied_file_is_continued_where_it_ends(cache: FileCache, source: Source) -> None:
    partial = cache.path(described(CONTENT).digest + ".partial")
    partial.write_bytes(CONTENT[:4096])
    assert (await fetched(cache, source)).read_bytes() == CONTENT
    assert source.num_bytes == len(CONTENT) - 4096
    assert not partial.exists()


async def test_a_person_who_joins_sees_how_much_is_left_and_for_how_long(
    cache: FileCache, source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = DrivenProgress(monkeypatch)
    monkeypatch.setattr(file_fetch, "_MB", 1000.0)
    cache.path(described(CONTENT).digest + ".partial").write_bytes(CONTENT[:240])
    source.before_each = lambda: seen.let_pass(3.0)
    await fetched(cache, source)
    name = "fetching the run's files"
    # Ten parts of three seconds; what was here counts neither as done nor as left.
    assert seen.lines == [
        f"{name}: model/config.json, 0 %, 0 of 10 MB, no estimate yet",
        f"{name}: model/config.json, 40 %, 4 of 10 MB, about 0:22 left",
        f"{name}: model/config.json, 80 %, 8 of 10 MB, about 0:06 left",
        f"{name}: done after 0:30",
    ]


async def test_a_file_that_another_process_fetches_is_named_while_it_is_waited_for(
    cache: FileCache, source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, file = DrivenProgress(monkeypatch), described(CONTENT)
    async with asyncio.TaskGroup() as tasks:
        with cache.filling(file) as partial:
            other = tasks.create_task(fetched(cache, source))
            async with asyncio.timeout(60):
                while not any("another process fetches model/config.json" in line for line in seen.lines):
                    await asyncio.sleep(0.01)
                    seen.let_pass(1.0)
            partial.append(memoryview(CONTENT))
            partial.finish()
    assert other.result() and "done after" in seen.lines[-1]


async def test_the_reading_of_large_cached_files_is_shown_too(
    cache: FileCache, source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, find = DrivenProgress(monkeypatch), cache.find

    def slow(file: ManifestFile) -> Path | None:
        seen.let_pass(4.0)
        return find(file)

    await fetched(cache, source)
    assert seen.lines == [], "no fetch of less than two seconds is shown"
    monkeypatch.setattr(cache, "find", slow)
    await fetched(cache, source)
    assert seen.lines == [
        "verifying cached files: model/config.json, 0 %, 0 of 0 MB, no estimate yet",
        "verifying cached files: done after 0:04",
    ]


async def test_a_half_copied_file_that_is_damaged_is_fetched_from_its_first_byte(
    cache: FileCache, source: Source
) -> None:
    cache.path(described(CONTENT).digest + ".partial").write_bytes(b"\0" * 4096)
    assert (await fetched(cache, source)).read_bytes() == CONTENT
    assert source.num_bytes == 2 * len(CONTENT) - 4096


def test_another_digest_is_never_kept(cache: FileCache) -> None:
    file = described(CONTENT)
    with cache.filling(file) as partial:
        partial.append(memoryview(CONTENT[::-1]))
        with pytest.raises(CachedFileDamaged):
            partial.finish()
        assert partial.num_bytes == 0
    assert cache.find(file) is None


async def test_a_full_disk_is_named_with_its_folder_and_the_file_is_continued_with_room(
    tmp_path: Path, source: Source
) -> None:
    with small_disk(tmp_path / "small") as disk:
        cache = FileCache(disk.folder / "cache")
        for num_pages in (0, 1):
            disk.leave(num_pages)
            with pytest.raises(
                StorageFailed,
                match=r"small/cache cannot hold model/config.json of 10,240 bytes: No space left.*XDG_CACHE",
            ):
                await fetched(cache, source)
            assert cache.find(described(CONTENT)) is None
        # The page that was written is not fetched again.
        disk.leave(2)
        assert (await fetched(cache, source)).read_bytes() == CONTENT


async def test_one_process_fetches_a_file_while_the_others_wait(cache: FileCache, source: Source) -> None:
    file = described(CONTENT)
    async with asyncio.TaskGroup() as tasks:
        with cache.filling(file) as partial:
            with pytest.raises(CachedFileBusy):
                cache.filling(file).__enter__()
            other = tasks.create_task(fetched(cache, source))
            await asyncio.sleep(0.1)
            assert not other.done()
            partial.append(memoryview(CONTENT))
            whole = partial.finish()
    # The first has made the whole file, and its beginning is not continued.
    assert other.result() == whole
    assert source.num_bytes == 0


async def test_a_wait_for_another_process_has_an_end(
    cache: FileCache, source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_fetch, "_OTHERS_S", 0.05)
    with (
        cache.filling(described(CONTENT)),
        pytest.raises(ConfigError, match="is still being fetched by another process"),
    ):
        await fetched(cache, source)


@pytest.mark.timeout(30)
def test_an_interrupt_ends_a_wait_for_another_process(cache: FileCache, source: Source) -> None:
    async def interrupted() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await fetched(cache, source)

    with cache.filling(described(CONTENT)):
        # The loop's end waits for its threads.
        asyncio.run(interrupted())


async def test_a_server_gives_no_other_file_and_answers_requests_for_files_alone(source: Source) -> None:
    unknown = await source.server.answer_later(FileRequest(digest="sha256:" + "0" * 64, offset=0, max_bytes=10))
    assert unknown.data.size == unknown.total_bytes == 0
    beyond = FileRequest(digest=described(CONTENT).digest, offset=10**9, max_bytes=10)
    assert (await source.server.answer_later(beyond)).data.size == 0
    with pytest.raises(UnknownMessage):
        source.server.answer_now(WeightsRequest(version=0, offset=0, max_bytes=1))
