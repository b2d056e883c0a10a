"""Restores a learner: from a snapshot in its host's memory, else a checkpoint, else the start model."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pipeline.config.shares import gathered_ranks
from pipeline.preflight.model_folder import loading
from pipeline.runtime.actor import ActorContext
from pipeline.training.checkpoints import CHECKPOINTS, Checkpoint, CheckpointFolder, list_checkpoints
from pipeline.training.snapshots import SnapshotFolder, snapshots_folder
from pipeline.training.update_log.records import Origin
from protocol.errors import ConfigError
from workers.engines.build import build_training_backend
from workers.engines.training.seam import TrainingBackend
from workers.snapshots import RestoredSnapshot, SnapshotWriter, restore_snapshot


@dataclass(frozen=True, slots=True)
class RestoredState:
    folder: CheckpointFolder
    backend: TrainingBackend
    snapshots: SnapshotWriter
    origin: Origin
    name: str
    """For the log, such as ``checkpoint 000012.version-7``."""
    checkpoint: Path | None
    has_checkpoint: bool
    state: dict[str, Any]
    kept: dict[str, tuple[str, ...]]
    """Claims whose effect is in the weights but not on disk, with their units."""
    num_returned: int
    """Units of other claims, which are ready again."""


async def restore_learner(ctx: ActorContext) -> RestoredState:
    """Take over checkpoints and snapshots, build the backend and load the newest good state.

    The previous learner's claims are settled, kept or returned accordingly. Raises ConfigError when
    the ledger does not know a run that has a checkpoint, and DataError when there is no snapshot
    and all checkpoints are damaged."""
    folder = CheckpointFolder(ctx.run_dir / CHECKPOINTS, owner=str(ctx.who), keep=ctx.config.checkpoint.keep)
    await ctx.compute(folder.enter)
    memory = SnapshotFolder(
        snapshots_folder(ctx.run_dir),
        owner=str(ctx.who),
        run=await ctx.compute(folder.identity),
        set_aside=folder.last_set_aside,
    )
    writer = SnapshotWriter(ctx, memory, gathered_ranks=gathered_ranks(ctx.config.learner))
    found = await writer.take_over()
    on_disk = await ctx.compute(list_checkpoints, folder.root)
    ctx.starting(loading(ctx.config.model.path))
    backend = await ctx.prepare("training", build_training_backend, ctx.start_config)
    if on_disk and not await ctx.ledger.restarts():
        raise ConfigError(
            f"the ledger has no record of this run, but {on_disk[-1].path.name} was written with one: its server "
            f"was emptied, or this is another server. Set ledger.url to the right one, or start a new run from the "
            f"checkpoint's model"
        )
    restore = partial(
        restore_snapshot,
        ctx,
        memory,
        on_disk=on_disk,
        missing=ctx.ledger.missing,
        put_back=backend.put_back,
        counted="num_updates",
    )
    restored = await restore(found) if found else None
    if restored is not None:
        return await _from_memory(ctx, folder, backend, writer, restored, on_disk)
    checkpoint = await ctx.compute(folder.newest)
    if checkpoint is not None:
        ctx.starting(f"loading checkpoint {checkpoint.path.name}")
        await ctx.compute(backend.load, checkpoint.path)
    state = checkpoint.state if checkpoint else {}
    return RestoredState(
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


async def _from_memory(
    ctx: ActorContext,
    folder: CheckpointFolder,
    backend: TrainingBackend,
    writer: SnapshotWriter,
    restored: RestoredSnapshot,
    on_disk: list[Checkpoint],
) -> RestoredState:
    """Settle the claims that the newest checkpoint holds and keep the snapshot's other claims.

    The checkpoint's writer may have died before it settled them."""
    snapshot = restored.snapshot
    if on_disk:
        num_updates = int(on_disk[-1].state.get("num_updates", 0))
        await ctx.ledger.settle(ctx.who, restored.settled, num_updates=num_updates)
    held: dict[str, list[str]] = snapshot.state["claims"]
    kept = {claim: tuple(held[claim]) for claim in restored.kept}
    returned = await ctx.ledger.recover(ctx.who, (), kept=restored.kept)
    state = {**snapshot.state, "claims": ()}
    return RestoredState(
        folder, backend, writer, Origin.SNAPSHOT, snapshot.name, None, bool(on_disk), state, kept, returned
    )
