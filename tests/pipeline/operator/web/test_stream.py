"""The stream of pictures has one reader for all pages, none without one, and waits for none."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.operator.attached import Attached
from pipeline.operator.web import reader as web_reader
from pipeline.operator.web.reader import EventStream, PageFeed, RunReader
from pipeline.operator.web.views import painter, trouble_picture
from tests.pipeline.operator.web.served import ServedRun

Message = dict[str, Any]
SCOPE: dict[str, Any] = {"type": "http"}


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures come without a second between them."""
    monkeypatch.setattr(web_reader, "_EVERY_S", 0.05)
    monkeypatch.setattr(web_reader, "_PICTURE_COST", 1.0)
    monkeypatch.setattr(web_reader, "_RETRY_S", 0.05)


class Page:
    """An open page, as the server sees it."""

    def __init__(self, reads: Callable[[int], bool] = lambda _: True) -> None:
        """``reads``: whether the page takes the message of this number."""
        self.sent: list[Message] = []
        self.gone = asyncio.Event()
        self._reads = reads

    async def receive(self) -> Message:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        if not self._reads(len(self.sent)):
            await asyncio.Event().wait()
        self.sent.append(message)

    @property
    def pictures(self) -> list[Any]:
        """The pictures that came."""
        blocks = [block for one in self.sent for block in one.get("body", b"").decode().split("\n\n")]
        lines = [line for block in blocks for line in block.split("\n") if line.startswith("data: ")]
        return [json.loads(line[6:]) for line in lines]


async def until(condition: Callable[[], bool], limit_s: float = 20.0) -> None:
    async with asyncio.timeout(limit_s):
        while True:
            if condition():
                return
            await asyncio.sleep(0.01)


def run_reader(served: ServedRun) -> RunReader:
    return RunReader(served.run_dir, painter, trouble_picture)


async def test_a_page_receives_pictures_of_the_run_until_it_goes(served: ServedRun) -> None:
    reader, page = run_reader(served), Page()
    async with asyncio.TaskGroup() as group:
        group.create_task(EventStream(reader)(SCOPE, page.receive, page.send))
        await until(lambda: len(page.pictures) >= 2)
        page.gone.set()
    picture = page.pictures[0]
    assert picture["overview"]["state"] == "running"
    assert {row["worker"] for row in picture["overview"]["workers"]} == {"learner", "generator-0"}
    assert picture["facts"]["algorithm"] == "dapo"
    assert dict(page.sent[0]["headers"])[b"content-type"].startswith(b"text/event-stream")
    await asyncio.to_thread(reader.close)


async def test_all_pages_share_one_reader_and_nothing_runs_without_a_page(
    served: ServedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web_reader, "_LINGER_S", 0.1)
    before = threading.active_count()
    reader, pages = run_reader(served), [Page(), Page(), Page()]
    assert not reader.is_reading
    async with asyncio.TaskGroup() as group:
        for page in pages:
            group.create_task(EventStream(reader)(SCOPE, page.receive, page.send))
        await until(lambda: all(page.pictures for page in pages))
        assert [thread.name for thread in threading.enumerate()].count("run-reader") == 1
        for page in pages:
            page.gone.set()
    await until(lambda: not reader.is_reading)
    await until(lambda: threading.active_count() <= before)
    # A page that comes later finds the run again, and no picture of before.
    began_s, page = time.time(), Page()
    async with asyncio.TaskGroup() as group:
        group.create_task(EventStream(reader)(SCOPE, page.receive, page.send))
        await until(lambda: len(page.pictures) >= 1)
        page.gone.set()
    assert page.pictures[0]["overview"]["at_s"] >= began_s
    await asyncio.to_thread(reader.close)


async def test_a_page_that_does_not_read_is_dropped_and_the_others_go_on(served: ServedRun) -> None:
    reader, slow, quick = run_reader(served), Page(reads=lambda number: number < 2), Page()
    async with asyncio.TaskGroup() as group:
        dropped = group.create_task(EventStream(reader, send_s=0.05)(SCOPE, slow.receive, slow.send))
        going = group.create_task(EventStream(reader)(SCOPE, quick.receive, quick.send))
        await until(dropped.done)
        assert len(slow.sent) == 2
        number = len(quick.pictures)
        await until(lambda: len(quick.pictures) > number + 1)
        assert not going.done()
        quick.gone.set()
    await asyncio.to_thread(reader.close)


async def test_a_slow_page_misses_pictures_and_receives_the_newest() -> None:
    feed = PageFeed()
    for number in range(1, 101):
        feed.publish(b"%d" % number)
    message = await feed.after(0, timeout_s=1.0)
    assert message is not None
    assert (message.number, message.body) == (100, b"100")
    assert await feed.after(100, timeout_s=0.01) is None
    feed.close()
    assert await feed.after(100, timeout_s=60.0) is None


async def test_streams_end_when_the_server_does(served: ServedRun) -> None:
    reader, page = run_reader(served), Page()
    async with asyncio.TaskGroup() as group:
        stream = group.create_task(EventStream(reader)(SCOPE, page.receive, page.send))
        await until(lambda: len(page.pictures) >= 1)
        reader.feed.close()
        await until(stream.done, 5.0)
    assert page.sent[-1] == {"type": "http.response.body", "body": b"", "more_body": False}
    await asyncio.to_thread(reader.close)
    assert not reader.is_reading


async def test_an_answer_serves_all_that_ask_meanwhile(served: ServedRun) -> None:
    reader, asked = run_reader(served), list[float]()

    async def question(_: object) -> dict[str, int]:
        asked.append(time.monotonic())
        await asyncio.sleep(0.05)
        return {"number": len(asked)}

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(reader.view("audit", question)) for _ in range(20)]
    assert len(asked) == 1
    assert len({task.result() for task in tasks}) == 1
    # It serves 200 times as long as it took, unless the run is changed.
    assert json.loads(await reader.view("audit", question))["number"] == 1
    reader.forget()
    await asyncio.sleep(0.05)
    assert json.loads(await reader.view("audit", question))["number"] == 2
    await asyncio.to_thread(reader.close)


async def test_a_run_without_a_ledger_is_said_and_its_files_are_shown(served: ServedRun) -> None:
    empty = served.run_dir.parent / "empty"
    empty.mkdir()
    (empty / "config.toml").write_text((served.run_dir / "config.toml").read_text())
    reader, page = RunReader(empty, painter, trouble_picture), Page()
    async with asyncio.TaskGroup() as group:
        group.create_task(EventStream(reader)(SCOPE, page.receive, page.send))
        await until(lambda: len(page.pictures) >= 1)
        page.gone.set()
    assert page.pictures[0]["overview"] is None
    assert page.pictures[0]["trouble"]
    assert page.pictures[0]["stamp"] == [0, 0, 0]
    await asyncio.to_thread(reader.close)


async def test_a_reader_that_meets_an_unexpected_error_says_it_and_reads_on(served: ServedRun) -> None:
    faults = [ZeroDivisionError("a fault")]

    def faulty(at: Attached) -> Callable[[], Awaitable[object]]:
        if faults:
            raise faults.pop()
        return painter(at)

    reader, page = RunReader(served.run_dir, faulty, trouble_picture), Page()
    async with asyncio.TaskGroup() as group:
        group.create_task(EventStream(reader)(SCOPE, page.receive, page.send))
        await until(lambda: any(picture["overview"] for picture in page.pictures))
        page.gone.set()
    assert "ZeroDivisionError: a fault" in page.pictures[0]["trouble"]
    await asyncio.to_thread(reader.close)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_a_reader_whose_thread_died_is_replaced_at_the_next_question(served: ServedRun) -> None:
    faults = [ZeroDivisionError("a fault"), ZeroDivisionError("a fault")]

    def faulty(at: Attached) -> Callable[[], Awaitable[object]]:
        if len(faults) > 1:
            raise faults.pop()
        return painter(at)

    def no_picture(run_dir: Path, words: str) -> object:
        raise faults.pop()

    reader = RunReader(served.run_dir, faulty, no_picture)
    with reader.used():
        await until(lambda: not reader.is_reading)

    async def question(at: Attached) -> str:
        return at.run_dir.name

    assert await reader.ask(question) == served.run_dir.name
    await asyncio.to_thread(reader.close)
