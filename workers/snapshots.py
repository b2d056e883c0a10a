"""Snapshots in the host's memory, of the learner after every update and the value worker after
every step, and their restore by a successor.

The worker lends its engine's state to a copy and continues. The engine waits for the copy to finish
before it changes the state (``pipeline.training.live_states``). Copy, digest and manifest are made
on another thread (``pipeline.training.snapshots``). A snapshot that is due before the last one is
sealed is skipped.

A successor restores the newest sealed snapshot that is no older than the newest checkpoint and
whose claims are all in the ledger or in a checkpoint. (A ledger that lost its last writes hands out
the units of an unknown claim again, and the snapshot would train on them twice.) Any other is
refused by name. So at most one update is repeated. If copying and sealing take longer than an
update, only every k-th update has a snapshot, and at most 2k - 1 are repeated.

A snapshot settles nothing. If none can be made, this is logged once and the run relies on
checkpoints.

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
"""Multiples of the state's size that must be free: two buffers, and a checkpoint's copy."""
_SEAL_S = 10.0
"""Longest wait of a drain for a snapshot; the drain's own checkpoint has everything in it."""
_FAILURES = (OSError, MemoryError, RuntimeError)
"""What a copy raises without room, when the folder was taken over, or in torch."""


class SnapshotWriter:
    def __init__(
        self,
        ctx: ActorContext,
        folder: SnapshotFolder,
        *,
        gathered_ranks: int = 1,
        room: Callable[[], Room] = lambda: room_here(this_machine()),
    ) -> None:
        """``gathered_ranks`` is the number of ranks whose state a snapshot must gather; 1 if none."""
        self._ctx = ctx
        self._folder = folder
        self._gathered_ranks = gathered_ranks
        self._room = room
        self._task: Task[None] | None = None
        self._loan: StateLoan | None = None
        settings = ctx.config.checkpoint
        self._is_off = settings.snapshots == "off"
        self._is_room_known = settings.snapshots == "on"

    @property
    def waited_s(self) -> float:
        """Seconds that the engine has waited for the copy of the last snapshot."""
        return 0.0 if self._loan is None else self._loan.waited_s

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
                f"with these settings of its ranks, every snapshot would gather the state of the {self._gathered_ranks} ranks "
                f"of the {self._ctx.who.role}; set checkpoint.snapshots to on to take them anyway"
            )
        return found

    async def start_snapshot(
        self,
        live_state: Callable[[], LiveState],
        state: dict[str, Any],
        *,
        version: int,
        num_updates: int,
        after: Callable[[], None] = lambda: None,
    ) -> None:
        """Lend the engine's state to a copy, together with the worker's ``state``; the caller
        continues. ``after`` blocks until the copy may be sealed.

        ``num_updates`` (steps, for the value model) is what a successor compares with the newest
        checkpoint."""
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
        self._task = self._ctx.spawn("snapshot", self._keep(self._loan, after, seal, version), endless=False)

    async def wait(self) -> None:
        """Wait, in a drain, until the snapshot in progress is sealed, within a limit."""
        limit_s = min(_SEAL_S, self._ctx.config.supervisor.drain_timeout_s / 2)
        if self._task is not None and not self._task.done():
            await asyncio.wait({self._task}, timeout=limit_s)

    def _lend(self, live_state: Callable[[], LiveState]) -> tuple[OpenBuffer, StateLoan]:
        """Start a loan to a buffer, after checking once that there is room. Raises OSError."""
        live = live_state()
        if not self._is_room_known:
            wanted, room = _ROOM * live.num_bytes, self._room()
            free = min(room.free, room.shared or 0)
            if free < wanted:
                raise StorageFailed(
                    f"weights and optimiser take {live.num_bytes / 1e9:.1f} GB, so {wanted / 1e9:.1f} GB of memory must be "
                    f"free, also in /dev/shm, but {free / 1e9:.1f} GB are"
                )
            self._is_room_known = True
        placed = self._folder.place(live)
        return placed, live.lend(placed.pages)

    async def _keep(self, loan: StateLoan, after: Callable[[], None], seal: Callable[[], None], version: int) -> None:
        def copy_and_seal() -> None:
            # the loan ends here, on the thread, which keeps running if the task is cancelled
            loan.copy()
            after()
            try:
                seal()
            except OSError as error:
                raise StorageFailed(
                    f"{error}; a newer incarnation has taken over the folder, or it was removed"
                ) from error

        try:
            await asyncio.to_thread(copy_and_seal)
        except _FAILURES as error:
            self._stop(error)
            return
        self._ctx.count("snapshots")
        self._ctx.counters["snapshot_version"] = version

    def _stop(self, reason: str | Exception) -> None:
        """Turn snapshots off and free their memory; logged once."""
        self._is_off = True
        self._folder.clear()
        self._ctx.log.warning(
            "snapshots_off",
            # an error may have no message
            reason=str(reason) or repr(reason),
            action="the run continues with checkpoints alone; after a crash the updates since the last one are repeated",
        )


Missing = Callable[[tuple[str, ...]], Awaitable[tuple[str, ...]]]
"""Returns the claims that the ledger does not have."""


@dataclass(frozen=True, slots=True)
class RestoredSnapshot:
    snapshot: StateSnapshot
    settled: tuple[str, ...]
    """Claims of the newest checkpoint, whose writer may have died before it settled them."""
    kept: tuple[str, ...]
    """Claims of the snapshot that are in the ledger but not in that checkpoint."""


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
        ctx: the worker's context.
        memory: the folder of the snapshots.
        found: newest first.
        on_disk: checkpoints, oldest first.
        missing: returns the claims that the ledger does not have.
        put_back: restores a state; on DataError nothing has changed.
        counted: key of the number of updates or steps in a checkpoint's state."""
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
    """Return why a snapshot must not be restored, or ""; ``gone`` are claims that the ledger lacks."""
    newest = on_disk[-1] if on_disk else None
    if newest and snapshot.manifest.num_updates < int(newest.state.get(counted, 0)):
        return f"it is older than {newest.path.name}"
    settled = {claim for checkpoint in on_disk for claim in checkpoint.state.get("claims", ())}
    if unknown := [claim for claim in gone if claim not in settled]:
        return (
            f"the ledger does not know {len(unknown)} of its claims, first {unknown[0]}: its server lost writes, and hands "
            "out their units again"
        )
    return ""
