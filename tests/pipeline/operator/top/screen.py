"""A view on a screen of the test's size, its text, and a feed made by hand."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from textual.pilot import Pilot

from pipeline.ledger.admin import StoredChunk
from pipeline.observability.log_lines import LogReader
from pipeline.operator.overview import OverviewReader, RunOverview
from pipeline.operator.top.app import TopApp
from pipeline.operator.top.feed import InspectionView
from protocol.errors import ConfigError
from protocol.ids import Role
from tests.oracle.ledger.inspection import MemoryInspection
from tests.pipeline.operator.small_run import SmallRun


class HandFeed:
    """A feed over a run in memory, whose next picture comes once it is ``wanted``. It records
    changes, or refuses them with ``refusal``."""

    def __init__(self, run: SmallRun) -> None:
        self.run_dir: Path = run.run_dir
        self.run = run
        self.reader: OverviewReader = run.reader()
        self.done: list[str] = []
        self.refusal = ""
        self.chunks: Sequence[StoredChunk] = ()
        self.lives: dict[str, list[str]] = {}
        self.num_reading = self.most_reading = 0
        self.wanted, self.has_read = asyncio.Event(), asyncio.Event()

    async def read(self) -> RunOverview:
        self.num_reading += 1
        self.most_reading = max(self.most_reading, self.num_reading)
        await self.wanted.wait()
        self.wanted.clear()
        picture = await self.reader.read()
        self.num_reading -= 1
        self.has_read.set()
        return picture

    async def inspect(self) -> InspectionView | None:
        inspection = MemoryInspection(self.run.ledger)
        return InspectionView(await inspection.versions(), await inspection.drops())

    async def scale(self, role: Role, change: int) -> str:
        return self._do(f"scale {role} {change:+d}")

    async def drain(self, worker: str) -> str:
        return self._do(f"drain {worker}")

    async def pause(self) -> str:
        return self._do("pause")

    async def resume(self) -> str:
        return self._do("resume")

    async def recent(self) -> Sequence[StoredChunk]:
        return self.chunks

    async def trajectory(self, name: str) -> list[str]:
        if name not in self.lives:
            raise ConfigError(f"{name} is not in the ledger")
        return self.lives[name]

    def log(self, worker: str) -> LogReader:
        return LogReader(self.run_dir, workers=(worker,))

    def _do(self, what: str) -> str:
        if self.refusal:
            raise ConfigError(self.refusal)
        self.done.append(what)
        return f"done: {what}"


class Shown:
    """A running view."""

    def __init__(self, app: TopApp, pilot: Pilot[Any], feed: HandFeed) -> None:
        self.app, self.pilot, self.feed = app, pilot, feed

    @property
    def lines(self) -> list[str]:
        """The screen's lines, without the spaces at their ends."""
        strips = self.app.screen._compositor.render_strips()
        return ["".join(segment.text for segment in strip).rstrip() for strip in strips]

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    async def press(self, *keys: str) -> str:
        """Press keys; return the text after a further picture."""
        for key in keys:
            await self.pilot.press(key)
        await self.next_picture()
        return self.text

    async def next_picture(self) -> str:
        """Have another picture come; return the text."""
        self.feed.has_read.clear()
        self.feed.wanted.set()
        await asyncio.wait_for(self.feed.has_read.wait(), 30.0)
        await self.pilot.pause()
        return self.text


@asynccontextmanager
async def shown(feed: HandFeed, size: tuple[int, int] = (80, 24), **more: Any) -> AsyncIterator[Shown]:
    """Run the view; yield it with its first picture."""
    app = TopApp(feed, refresh_s=0.001, **more)
    async with app.run_test(size=size) as pilot:
        view = Shown(app, pilot, feed)
        await view.next_picture()
        yield view
