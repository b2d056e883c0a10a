"""Snapshots in the host's memory: the learner's after every update, the value worker's after every
step, beside the next one.

The worker waits for one copy, on its compute thread. Digest and manifest follow on another thread
(``pipeline.training.snapshots``). A snapshot that is due before the last one is sealed is left out,
as is one for which every buffer is being read.

A snapshot settles nothing. Where it cannot be made, the log reports it once, and the run goes on
with checkpoints alone.

Counters in the heartbeat: ``snapshot_version``, ``snapshots``, ``skipped_snapshots``,
``snapshot_s`` (seconds that the worker waited for them)."""

from __future__ import annotations

import asyncio
import time
from asyncio import Task
from collections.abc import Callable
from functools import partial
from typing import Any

from pipeline.preflight.memory_needs import Room, room_here
from pipeline.runtime.actor import ActorContext
from pipeline.runtime.machine import this_machine
from pipeline.training.snapshots import FilledBuffer, LiveState, SnapshotFolder, StateSnapshot
from protocol.errors import ConfigError, StorageFailed

_ROOM = 3
"""Sizes of the state that must be free: two buffers, and a checkpoint's copy beside them."""
_SEAL_S = 60.0
"""Most that a drain waits for a seal."""


class SnapshotWriter:
    """Takes one worker's snapshots, one at a time."""

    def __init__(
        self,
        ctx: ActorContext,
        folder: SnapshotFolder,
        *,
        ranks: int,
        room: Callable[[], Room] = lambda: room_here(this_machine()),
    ) -> None:
        """``ranks``: that share the state. ``room``: returns the memory that could be had now."""
        self._ctx = ctx
        self._folder = folder
        self._ranks = ranks
        self._room = room
        self._task: Task[None] | None = None
        settings = ctx.config.checkpoint
        self._is_off = settings.snapshots == "off"
        self._is_room_known = settings.snapshots == "on"

    async def take_over(self) -> list[StateSnapshot]:
        """Become the only writer; return the predecessor's snapshots, newest first."""
        if self._is_off and not self._folder.is_there:
            return []
        try:
            found = await self._ctx.compute(self._folder.take_over)
        except (OSError, ConfigError) as error:
            if not self._is_off:
                self._stop(str(error))
            return []
        if self._is_off:
            await self._ctx.compute(self._folder.remove)
            return []
        if self._ranks > 1 and not self._is_room_known:
            self._stop(
                f"{self._ctx.who.role} has {self._ranks} ranks: every snapshot would gather the state of all of them; "
                "checkpoint.snapshots = on takes them all the same"
            )
        return found

    async def take(
        self, live_state: Callable[[], LiveState], state: dict[str, Any], *, version: int, num_updates: int
    ) -> None:
        """Copy the engine's state, with the worker's beside it; the caller goes on while the copy
        is sealed. ``num_updates``: or the value model's steps, by which a successor compares."""
        if self._is_off:
            return
        if self._task is not None and not self._task.done():
            self._ctx.count("skipped_snapshots")
            return
        started_s = time.perf_counter()
        try:
            filled = await self._ctx.compute(self._copy, live_state)
        except (OSError, StorageFailed) as error:
            self._stop(str(error))
            return
        if filled is None:
            self._ctx.count("skipped_snapshots")
            return
        self._ctx.count("snapshots")
        self._ctx.count("snapshot_s", time.perf_counter() - started_s)
        seal = partial(self._folder.seal, filled, version=version, num_updates=num_updates, state=state)
        self._task = self._ctx.spawn("snapshot", self._seal(seal, version), endless=False)

    async def wait(self) -> None:
        """Wait until nothing is being sealed, at most a minute."""
        if self._task is not None and not self._task.done():
            await asyncio.wait({self._task}, timeout=_SEAL_S)

    def _copy(self, live_state: Callable[[], LiveState]) -> FilledBuffer | None:
        """Fill a buffer, once it is known that there is room. Raises OSError and StorageFailed."""
        live = live_state()
        if not self._is_room_known:
            wanted, room = _ROOM * live.num_bytes, self._room()
            free = min(room.free, room.shared or 0)
            if free < wanted:
                raise StorageFailed(
                    f"weights and optimiser are {live.num_bytes / 1e9:.1f} GB, so {wanted / 1e9:.1f} GB of memory must be "
                    f"free, in /dev/shm too; {free / 1e9:.1f} GB are"
                )
            self._is_room_known = True
        return self._folder.fill(live)

    async def _seal(self, seal: Callable[[], None], version: int) -> None:
        try:
            await asyncio.to_thread(seal)
        except OSError as error:
            self._stop(f"{error}; a newer incarnation has taken the folder over, or it was removed")
            return
        self._ctx.counters["snapshot_version"] = version

    def _stop(self, reason: str) -> None:
        """Report once that there are no snapshots, and give the memory back."""
        self._is_off = True
        self._folder.clear()
        self._ctx.log.warning(
            "snapshots_off",
            reason=reason,
            action="the run goes on with checkpoints alone; after a death the updates since the last one are made again",
        )
