"""The connection of ``headrace top`` to a run."""

from __future__ import annotations

import asyncio
import tempfile
import threading
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from pipeline.ledger.server import copy as server_copy
from pipeline.operator.attached import Attached, attach, look_at
from pipeline.operator.top.feed import RunFeed
from protocol.errors import ConfigError
from tests.pipeline.made_run import stopped_run


async def nothing(_: Attached) -> None:
    """Leave the ledger as it is."""


async def no_lines(_: Attached, name: str) -> list[str]:
    return [name]


def is_empty(place: Path) -> bool:
    return not any(place.iterdir())


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where copies are made: a short path, since a server's socket is in it."""
    with tempfile.TemporaryDirectory(prefix="hr-") as folder:
        monkeypatch.setattr("tempfile.tempdir", folder)
        yield Path(folder)
        monkeypatch.undo()


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run that has ended."""
    return stopped_run(tmp_path, nothing)


async def test_the_screen_goes_on_while_a_copy_is_made(
    run_dir: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, goes_on, copied, waited = threading.Event(), threading.Event(), server_copy._copy, list[bool]()

    def slow(run: Path, to: Path) -> bool:
        begun.set()
        waited.append(goes_on.wait(5.0))
        return copied(run, to)

    monkeypatch.setattr(server_copy, "_copy", slow)
    feed = RunFeed(run_dir, no_lines)
    async with asyncio.TaskGroup() as group:
        reading = group.create_task(feed.read())
        assert await asyncio.to_thread(begun.wait, 10.0)
        goes_on.set()
    assert waited == [True], "the event loop ran meanwhile"
    assert reading.result().trouble == ""
    with pytest.raises(ConfigError, match="is not running"):
        await feed.pause()
    await feed.aclose()
    assert is_empty(place)


async def test_a_look_that_is_given_up_leaves_no_copy(
    run_dir: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, goes_on, copied = threading.Event(), threading.Event(), server_copy._copy

    def slow(run: Path, to: Path) -> bool:
        begun.set()
        goes_on.wait(5.0)
        return copied(run, to)

    monkeypatch.setattr(server_copy, "_copy", slow)
    async with asyncio.TaskGroup() as group:
        reading = group.create_task(RunFeed(run_dir, no_lines).read())
        assert await asyncio.to_thread(begun.wait, 10.0)
        reading.cancel()
        goes_on.set()
    assert reading.cancelled()
    assert is_empty(place)


async def test_a_feed_closed_while_it_connects_leaves_no_copy(
    run_dir: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, goes_on, copied = threading.Event(), threading.Event(), server_copy._copy

    def slow(run: Path, to: Path) -> bool:
        begun.set()
        goes_on.wait(5.0)
        return copied(run, to)

    monkeypatch.setattr(server_copy, "_copy", slow)
    feed = RunFeed(run_dir, no_lines)
    async with asyncio.TaskGroup() as group:
        group.create_task(feed.read())
        assert await asyncio.to_thread(begun.wait, 10.0)
        closing = group.create_task(feed.aclose())
        await asyncio.sleep(0.0)
        goes_on.set()
        await closing
    assert is_empty(place)


def test_an_event_loop_that_ends_with_a_look_open_ends_it_once(run_dir: Path, place: Path) -> None:
    held, errors = AsyncExitStack(), list[object]()

    async def look() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
        await held.enter_async_context(look_at(run_dir, in_thread=True))

    asyncio.run(look())
    assert errors == []
    assert is_empty(place)


async def test_a_copy_is_told_from_the_runs_own_server(run_dir: Path, place: Path) -> None:
    async with look_at(run_dir) as at:
        assert at.is_copy
    async with attach(run_dir) as at:
        assert not at.is_copy
        async with look_at(run_dir) as beside:
            assert not beside.is_copy
