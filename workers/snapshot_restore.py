"""Which snapshot a worker goes on from: the newest that is whole, no older than the newest
checkpoint, and whose claims are all known.

Each claim in it must be in the ledger, or in a checkpoint. A ledger that lost its last writes gives
the units of an unknown claim out again, and the snapshot would train on them twice. Any other is
refused by name."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

from pipeline.runtime.actor import ActorContext
from pipeline.training.checkpoints import Checkpoint
from pipeline.training.snapshots import KeptState, SnapshotFolder, StateSnapshot
from protocol.errors import DataError

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
    """Put back the first of ``found`` that may be gone on from; refuse those before it by name.

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
