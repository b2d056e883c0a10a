"""Where a new learner begins: a snapshot in its host's memory, else a checkpoint, else the start
model.

A snapshot counts while it is no older than the newest checkpoint. And each claim in it must be in
the ledger, or in a checkpoint. A ledger that lost its last writes gives the units of an unknown
claim out again, and the snapshot would train on them twice. Any other is refused by name."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.preflight.model_folder import loading
from pipeline.runtime.actor import ActorContext
from pipeline.training.checkpoints import CHECKPOINTS, Checkpoint, CheckpointFolder, list_checkpoints
from pipeline.training.snapshots import SnapshotFolder, StateSnapshot, snapshots_folder
from pipeline.training.update_log.records import Origin
from protocol.errors import ConfigError, DataError
from workers.engines.build import build_training_backend
from workers.engines.training.seam import TrainingBackend
from workers.learner.snapshot_writer import SnapshotWriter


@dataclass(frozen=True, slots=True)
class Beginning:
    """A learner's first state, and the claims that belong to it."""

    folder: CheckpointFolder
    backend: TrainingBackend
    snapshots: SnapshotWriter
    origin: Origin
    name: str
    """In words."""
    checkpoint: Path | None
    """Which was loaded, if one was."""
    has_checkpoint: bool
    """Whether there is one to fall back to."""
    state: dict[str, Any]
    kept: dict[str, tuple[str, ...]]
    """Claims whose effect is in the weights and on no disk, with their units."""
    num_returned: int
    """Units of other claims, which are ready again."""


async def begin(ctx: ActorContext) -> Beginning:
    """Take checkpoints and snapshots over, build the backend, and load the newest good state; then
    settle, keep and return the former learner's claims accordingly.

    Raises ConfigError when the ledger does not know a run that has a checkpoint, DataError when
    there is no snapshot and all checkpoints are damaged."""
    folder = CheckpointFolder(ctx.run_dir / CHECKPOINTS, owner=str(ctx.who), keep=ctx.config.checkpoint.keep)
    await ctx.compute(folder.enter)
    memory = SnapshotFolder(
        snapshots_folder(ctx.run_dir),
        owner=str(ctx.who),
        run=await ctx.compute(folder.identity),
        set_aside=folder.last_set_aside,
    )
    writer = SnapshotWriter(ctx, memory)
    found = await writer.take_over()
    on_disk = await ctx.compute(list_checkpoints, folder.root)
    ctx.starting(loading(ctx.config.model.path))
    backend = await ctx.compute(build_training_backend, ctx.start_config)
    if on_disk and not await ctx.ledger.restarts():
        raise ConfigError(
            f"the ledger has no record of this run, but {on_disk[-1].path.name} was written with one: its server was "
            "emptied or is another. Give the right one by ledger.url, or start a new run from the checkpoint's model"
        )
    for snapshot in found:
        gone = await ctx.ledger.missing(tuple(snapshot.state["claims"]))
        reason = why_not(snapshot, on_disk, gone)
        if not reason:
            ctx.starting(f"taking over the {snapshot.name}")
            try:
                await ctx.compute(lambda one=snapshot: backend.put_back(memory.read(one)))
            except DataError as error:
                reason = str(error)
        if reason:
            memory.refuse(snapshot, reason)
            continue
        return await _from_memory(ctx, folder, backend, writer, snapshot, on_disk, gone)
    checkpoint = await ctx.compute(folder.newest)
    if checkpoint is not None:
        ctx.starting(f"loading checkpoint {checkpoint.path.name}")
        await ctx.compute(backend.load, checkpoint.path)
    state = checkpoint.state if checkpoint else {}
    return Beginning(
        folder,
        backend,
        writer,
        Origin.CHECKPOINT if checkpoint else Origin.START_MODEL,
        f"checkpoint {checkpoint.path.name}" if checkpoint else "the start model",
        checkpoint.path if checkpoint else None,
        checkpoint is not None,
        state,
        {},
        await ctx.ledger.recover(ctx.who, tuple(state.get("claims", ()))),
    )


def why_not(snapshot: StateSnapshot, on_disk: list[Checkpoint], gone: tuple[str, ...]) -> str:
    """Return why a learner may not go on from a snapshot, "" if it may. ``gone``: its claims that
    are not in the ledger."""
    newest = on_disk[-1] if on_disk else None
    if newest and snapshot.manifest.num_updates < int(newest.state.get("num_updates", 0)):
        return f"it is older than {newest.path.name}"
    settled = {claim for checkpoint in on_disk for claim in checkpoint.state.get("claims", ())}
    if unknown := [claim for claim in gone if claim not in settled]:
        return (
            f"the ledger does not know {len(unknown)} of its claims, first {unknown[0]}: its server lost writes, and gives "
            "their units out again"
        )
    return ""


async def _from_memory(
    ctx: ActorContext,
    folder: CheckpointFolder,
    backend: TrainingBackend,
    writer: SnapshotWriter,
    snapshot: StateSnapshot,
    on_disk: list[Checkpoint],
    gone: tuple[str, ...],
) -> Beginning:
    """Settle what the newest checkpoint holds, as its writer may have died before it did; keep the
    snapshot's other claims."""
    settled: set[str] = set()
    if on_disk:
        claims = tuple(on_disk[-1].state.get("claims", ()))
        await ctx.ledger.settle(ctx.who, claims, num_updates=int(on_disk[-1].state.get("num_updates", 0)))
        settled = set(claims)
    held: dict[str, list[str]] = snapshot.state["claims"]
    kept = {claim: tuple(units) for claim, units in held.items() if claim not in gone and claim not in settled}
    returned = await ctx.ledger.recover(ctx.who, (), kept=tuple(kept))
    state = {**snapshot.state, "claims": ()}
    return Beginning(
        folder, backend, writer, Origin.SNAPSHOT, snapshot.name, None, bool(on_disk), state, kept, returned
    )
