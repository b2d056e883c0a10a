"""Snapshots in the host's memory: the learner's after every update, the value worker's after every
step; and their restore by a successor.

The worker lends its engine's state to a copy and goes on. The engine waits for the copy's end before
it changes the state (``pipeline.training.live_states``). Copy, digest and manifest are made on
another thread (``pipeline.training.snapshots``). A snapshot that is due before the last one is
sealed is skipped.

A successor restores the newest sealed snapshot that is no older than the newest checkpoint and whose
claims are all in the ledger or in a checkpoint. (A ledger that lost its last writes hands the units
of an unknown claim out again, and the snapshot would train on them twice.) Any other is refused by
name. So at most one update is repeated. Where copy and seal take longer than an update, only each
k-th update has a snapshot, and at most 2k - 1 are repeated.

A snapshot settles nothing. Where none can be made, the log says so once, and the run goes on with
checkpoints alone.

Counters in the heartbeat: ``snapshot_version``, ``snapshots``, ``skipped_snapshots``,
``snapshot_s`` (seconds that worker and engine waited for them)."""

from __future__ import annotations

import asyncio
import time
from asyncio import Task
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from pipeline.preflight.memory_needs import Room, room_here
from pipeline.runtime.actor import ActorContext
from pipeline.runtime.machine import this_machine
from pipeline.training.checkpoints import Checkpoint
from pipeline.training.live_states import LiveState, StateLoan
from pipeline.training.snapshots import KeptState, OpenBuffer, SnapshotFolder, StateSnapshot
from protocol.errors import ConfigError, DataError, StorageFailed

_ROOM = 3
"""Sizes of the state that must be free: two buffers, and a checkpoint's copy beside them."""
_SEAL_S = 10.0
"""Most that a drain waits for a snapshot: the drain's own checkpoint has all that is in it."""
_FAILURES = (OSError, MemoryError, RuntimeError)
"""Of a copy: no room, a folder that was taken over, torch's errors."""


class SnapshotWriter:
    """Takes one worker's snapshots, one at a time."""

    def __init__(
        self,
        ctx: ActorContext,
        folder: SnapshotFolder,
        *,
        gathered_ranks: int = 1,
        room: Callable[[], Room] = lambda: room_here(this_machine()),
    ) -> None:
        """``gathered_ranks``: those whose state a snapshot gathers; 1: none is. ``room``: returns
        the memory that could be had now."""
        self._ctx = ctx
        self._folder = folder
        self._gathered_ranks = gathered_ranks
        self._room = room
        self._task: Task[None] | None = None
        self._loan: StateLoan | None = None
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
                self._stop(error)
            return []
        if self._is_off:
            await self._ctx.compute(self._folder.remove)
            return []
        if self._gathered_ranks > 1 and not self._is_room_known:
            self._stop(
                f"every snapshot would gather the state of the {self._gathered_ranks} ranks of the {self._ctx.who.role}, with "
                "its settings of DeepSpeed; checkpoint.snapshots = on takes them all the same"
            )
        return found

    async def start_snapshot(
        self, live_state: Callable[[], LiveState], state: dict[str, Any], *, version: int, num_updates: int
    ) -> None:
        """Lend the engine's state to a copy, with the worker's ``state`` beside it; the caller goes
        on. ``num_updates``: or the value model's steps, by which a successor compares."""
        if self._is_off:
            return
        if self._task is not None and not self._task.done():
            self._ctx.count("skipped_snapshots")
            return
        if self._loan is not None:
            self._ctx.count("snapshot_s", self._loan.waited_s)
            self._loan = None
        started_s = time.perf_counter()
        try:
            lent = await self._ctx.compute(self._lend, live_state)
        except _FAILURES as error:
            self._stop(error)
            return
        self._ctx.count("snapshot_s", time.perf_counter() - started_s)
        placed, self._loan = lent
        seal = partial(self._folder.seal, placed, version=version, num_updates=num_updates, state=state)
        self._task = self._ctx.spawn("snapshot", self._keep(self._loan, seal, version), endless=False)

    async def wait(self) -> None:
        """Wait, in a drain, until nothing is being copied or sealed, or for its limit."""
        limit_s = min(_SEAL_S, self._ctx.config.supervisor.drain_timeout_s / 2)
        if self._task is not None and not self._task.done():
            await asyncio.wait({self._task}, timeout=limit_s)

    def _lend(self, live_state: Callable[[], LiveState]) -> tuple[OpenBuffer, StateLoan]:
        """Begin a loan to a buffer, once it is known that there is room. Raises OSError."""
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
        placed = self._folder.place(live)
        return placed, live.lend(placed.pages)

    async def _keep(self, loan: StateLoan, seal: Callable[[], None], version: int) -> None:
        def copy_and_seal() -> None:
            # here, on its thread, the loan ends: a task that is cancelled leaves the thread running
            loan.copy()
            try:
                seal()
            except OSError as error:
                raise StorageFailed(
                    f"{error}; a newer incarnation has taken the folder over, or it was removed"
                ) from error

        try:
            await asyncio.to_thread(copy_and_seal)
        except _FAILURES as error:
            self._stop(error)
            return
        self._ctx.count("snapshots")
        self._ctx.counters["snapshot_version"] = version

    def _stop(self, reason: str | Exception) -> None:
        """Report once that snapshots are off, and free their memory."""
        self._is_off = True
        self._folder.clear()
        self._ctx.log.warning(
            "snapshots_off",
            # an error may have no words
            reason=str(reason) or repr(reason),
            action="the run goes on with checkpoints alone; after a death the updates since the last one are made again",
        )


Missing = Callable[[tuple[str, ...]], Awaitable[tuple[str, ...]]]
"""Returns those of these claims that are not in the ledger."""


@dataclass(frozen=True, slots=True)
class RestoredSnapshot:
    """A snapshot whose state the worker has now."""

    snapshot: StateSnapshot
    settled: tuple[str, ...]
    """Claims of the newest checkpoint, which may have died before it settled them."""
    kept: tuple[str, ...]
    """Claims of the snapshot that are in the ledger, and in no such checkpoint."""


async def restore_snapshot(
    ctx: ActorContext,
    memory: SnapshotFolder,
    found: Iterable[StateSnapshot],
    on_disk: list[Checkpoint],
    *,
    missing: Missing,
    put_back: Callable[[KeptState], None],
    counted: str,
) -> RestoredSnapshot | None:
    """Restore the first snapshot of ``found`` that fits; refuse those before it by name.

    Args:
        ctx: The worker's.
        memory: Where they are.
        found: Newest first.
        on_disk: Checkpoints, oldest first.
        missing: Returns claims that are not in the ledger.
        put_back: Takes a state; with DataError nothing has changed.
        counted: The state's number of updates or steps, by its name in a checkpoint."""
    for snapshot in found:
        gone = await missing(tuple(snapshot.state["claims"]))
        reason = why_not(snapshot, on_disk, gone, counted=counted)
        if not reason:
            ctx.starting(f"taking over the {snapshot.name}")
            try:
                await ctx.compute(lambda one=snapshot: put_back(memory.read(one)))
            except DataError as error:
                reason = str(error)
        if reason:
            memory.refuse(snapshot, reason)
            continue
        settled = tuple(on_disk[-1].state.get("claims", ())) if on_disk else ()
        out = {*gone, *settled}
        return RestoredSnapshot(
            snapshot, settled, tuple(claim for claim in snapshot.state["claims"] if claim not in out)
        )
    return None


def why_not(snapshot: StateSnapshot, on_disk: list[Checkpoint], gone: tuple[str, ...], *, counted: str) -> str:
    """Return why a worker may not go on from a snapshot, "" if it may. ``gone``: its claims that
    are not in the ledger."""
    newest = on_disk[-1] if on_disk else None
    if newest and snapshot.manifest.num_updates < int(newest.state.get(counted, 0)):
        return f"it is older than {newest.path.name}"
    settled = {claim for checkpoint in on_disk for claim in checkpoint.state.get("claims", ())}
    if unknown := [claim for claim in gone if claim not in settled]:
        return (
            f"the ledger does not know {len(unknown)} of its claims, first {unknown[0]}: its server lost writes, and gives "
            "their units out again"
        )
    return ""
