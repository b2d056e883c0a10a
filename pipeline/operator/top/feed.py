"""The connection of ``headrace top`` to a run: snapshots and changes.

Every answer of the ledger has a time limit. The run may not exist yet, may end and may come back; the
feed reconnects. For a run that ended while shown, it never starts a copy of the ledger."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from pipeline.fleet.status import pause_words
from pipeline.ledger.inspection import DropsView, StalenessView
from pipeline.observability.log_lines import LogReader
from pipeline.observability.tables import drops_lines, versions_lines
from pipeline.operator import steering
from pipeline.operator.attached import Attached, look_at
from pipeline.operator.overview import OverviewReader, RunOverview
from pipeline.operator.top.format import staleness
from pipeline.runtime.registry.contract import RunState
from pipeline.supervisor.run_folder import supervisor_pid
from protocol.errors import ConfigError, HeadraceError
from protocol.ids import Role
from protocol.printable import printable_line

if TYPE_CHECKING:
    from pipeline.ledger.admin import StoredChunk
    from pipeline.runtime.registry.contract import Fleet


@dataclass(frozen=True, slots=True)
class InspectionView:
    """What the versions and drops views show of the ledger."""

    versions: StalenessView
    drops: DropsView


def version_page(run: RunOverview, found: InspectionView | None) -> list[Any]:
    """Return which versions sample, how stale the newest update was, and units by staleness."""
    versions = run.versions
    lines = [f"published: version {versions.published}"]
    for version, number in sorted(versions.sampling.items(), reverse=True):
        behind = versions.published - version
        name = "no weights yet" if version < 0 else f"version {version}"
        lag = f", {behind} behind" if version >= 0 and behind > 0 else ""
        lines.append(f"  {name}: {number} generator{'' if number == 1 else 's'}{lag}")
    lines.append(f"newest update: {staleness(run)}")
    return lines if found is None else [*lines, "", *versions_lines(found.versions)]


def drop_page(run: RunOverview, found: InspectionView | None) -> list[Any]:
    """Return what was dropped by reason, next to what was trained on."""
    if found is None:
        return [run.trouble or "the ledger has not answered yet"]
    words = "length: mean tokens of finished responses; difficulty: 1 minus the mean accuracy of the group"
    return [*drops_lines(found.drops), "", words]


_CONNECT_S = 8.0
_RECONNECT_AFTER_S = 10.0
"""After this long without an answer, the supervisor's ledger may have moved."""
_ACT_S = 8.0
MAX_RECENT = 200


class Feed(Protocol):
    """A run as the app reads and changes it."""

    @property
    def run_dir(self) -> Path: ...

    async def read(self) -> RunOverview:
        """Return the current snapshot; errors of the ledger become its ``trouble``."""
        ...

    async def inspect(self) -> InspectionView | None:
        """Return the ledger's counts of staleness and drops; None if it does not answer."""
        ...

    async def scale(self, role: Role, change: int) -> str:
        """Change the number of a role's workers; return the desired fleet in words."""
        ...

    async def drain(self, worker: str) -> str:
        """Have a worker finish and leave; return the desired fleet in words."""
        ...

    async def pause(self) -> str:
        """Stop admitting new groups; return the pause in words."""
        ...

    async def resume(self) -> str:
        """Admit new groups again; return what changed, in words."""
        ...

    async def recent(self) -> Sequence[StoredChunk]:
        """Return the newest response chunks that the ledger holds."""
        ...

    async def trajectory(self, name: str) -> list[str]:
        """Describe the life of a trajectory or chunk, as lines."""
        ...

    def log(self, worker: str) -> LogReader: ...


class RunFeed:
    """The feed of a real run. Changes raise ConfigError if refused."""

    def __init__(self, run_dir: Path, describe: Callable[[Attached, str], Awaitable[list[str]]]) -> None:
        """``describe`` returns a trajectory's life as lines; it raises ConfigError for an unknown
        name."""
        self.run_dir = run_dir
        self._describe = describe
        self._held = AsyncExitStack()
        self._changing = asyncio.Lock()
        """Held by a read, and while it disconnects: what a read has just connected must be closed too."""
        self._at: Attached | None = None
        self._reader: OverviewReader | None = None
        self._is_copy = False
        """Whether connected to a copy of the ledger, or to a server without a supervisor."""

    async def read(self) -> RunOverview:
        """Return the current snapshot; never raises if the run is not reachable."""
        async with self._changing:
            return await self._read()

    async def _read(self) -> RunOverview:
        try:
            await self._connect()
            assert self._reader is not None
            picture = await self._reader.read()
        except (HeadraceError, OSError, TimeoutError) as error:
            pid = await asyncio.to_thread(supervisor_pid, self.run_dir)
            words = printable_line(str(error)) or "no answer in time"
            name = printable_line(self.run_dir.name)
            return RunOverview(
                self.run_dir, name, time.time(), RunState.STARTING, "", pid, is_over=False, trouble=words
            )
        if picture.trouble_s > _RECONNECT_AFTER_S and picture.supervisor_pid is not None:
            await self._disconnect()
        if picture.trouble and picture.supervisor_pid is None:
            # The server ends with its supervisor, so the run seems to be over.
            picture = replace(picture, is_over=True, trouble="")
        return picture

    async def inspect(self) -> InspectionView | None:
        try:
            async with asyncio.timeout(_ACT_S):
                inspection = self._connected().inspection
                return InspectionView(await inspection.versions(), await inspection.drops())
        except (HeadraceError, OSError, TimeoutError):
            return None

    async def scale(self, role: Role, change: int) -> str:
        at = self._attached()
        async with asyncio.timeout(_ACT_S):
            fleet = await at.registry.fleet()
            present = 0 if fleet is None else fleet.counts.get(role, 0)
            if present + change < 1:
                raise ConfigError(f"the run needs a {role} worker; `headrace down` ends the run")
            wanted = await steering.change_fleet(at, {role: present + change})
        return _in_words(wanted)

    async def drain(self, worker: str) -> str:
        at = self._attached()
        async with asyncio.timeout(_ACT_S):
            return f"{printable_line(worker)} drains; {_in_words(await steering.drain(at, worker))}"

    async def pause(self) -> str:
        at = self._attached()
        async with asyncio.timeout(_ACT_S):
            return pause_words(await steering.pause(at))

    async def resume(self) -> str:
        at = self._attached()
        async with asyncio.timeout(_ACT_S):
            ended = await steering.resume(at)
        return "it was not paused" if ended is None else "resumed: new groups are admitted"

    async def recent(self) -> Sequence[StoredChunk]:
        async with asyncio.timeout(_ACT_S):
            return sorted(await self._connected().admin.stored(max_trajectories=MAX_RECENT), key=lambda one: one.age_s)

    async def trajectory(self, name: str) -> list[str]:
        async with asyncio.timeout(_ACT_S):
            return await self._describe(self._connected(), name)

    def log(self, worker: str) -> LogReader:
        return LogReader(self.run_dir, workers=(worker,))

    async def aclose(self) -> None:
        """Disconnect; the next read reconnects."""
        async with self._changing:
            await self._disconnect()

    async def _disconnect(self) -> None:
        self._at = self._reader = None
        held, self._held = self._held, AsyncExitStack()
        await held.aclose()

    async def _connect(self) -> None:
        if self._at is not None and not (self._is_copy and await self._has_supervisor()):
            return
        await self._disconnect()
        is_supervised = await self._has_supervisor()
        async with asyncio.timeout(_CONNECT_S):
            self._at = await self._held.enter_async_context(look_at(self.run_dir, in_thread=True))
        self._is_copy = not is_supervised or self._at.is_copy
        self._reader = OverviewReader(self._at)

    async def _has_supervisor(self) -> bool:
        return await asyncio.to_thread(supervisor_pid, self.run_dir) is not None

    def _connected(self) -> Attached:
        if self._at is None:
            raise ConfigError(f"{self.run_dir} does not answer yet")
        return self._at

    def _attached(self) -> Attached:
        at = self._connected()
        if self._is_copy:
            raise ConfigError(f"{self.run_dir} is not running; continue it with `headrace up --resume {self.run_dir}`")
        return at


def _in_words(fleet: Fleet) -> str:
    return f"wanted: {', '.join(f'{count} {name}' for name, count in fleet.counts.items())}"
