"""Where a new value worker begins: a snapshot in its host's memory, else a checkpoint, else the
start model. Which snapshots count: ``workers.snapshot_restore``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pipeline.config.shares import gathered_ranks
from pipeline.preflight.model_folder import loading
from pipeline.runtime.actor import ActorContext
from pipeline.training.checkpoints import VALUE_CHECKPOINTS, CheckpointFolder, list_checkpoints
from pipeline.training.snapshots import SnapshotFolder, value_snapshots_folder
from workers.engines.build import build_value_engine
from workers.engines.value.seam import ValueEngine
from workers.snapshot_restore import restore_snapshot
from workers.snapshot_writer import SnapshotWriter

NUM_STEPS = "num_steps"


@dataclass(frozen=True, slots=True)
class ValueBeginning:
    """A value worker's first state, and the claims that belong to it."""

    folder: CheckpointFolder
    engine: ValueEngine
    snapshots: SnapshotWriter
    name: str
    """In words."""
    is_on_disk: bool
    """Whether a checkpoint has all of this state."""
    state: dict[str, Any]
    kept: tuple[str, ...]
    """Claims whose effect is in the value model and on no disk."""
    num_returned: int
    """Trajectories of other claims, which wait again."""


async def begin_value(ctx: ActorContext) -> ValueBeginning:
    """Take checkpoints and snapshots over, build the engine, and load the newest good state; then
    settle, keep and return the former value worker's claims accordingly.

    Raises DataError when there is no snapshot and all checkpoints are damaged."""
    config = ctx.config
    folder = CheckpointFolder(ctx.run_dir / VALUE_CHECKPOINTS, owner=str(ctx.who), keep=config.value.checkpoint_keep)
    await ctx.compute(folder.enter)
    memory = SnapshotFolder(
        value_snapshots_folder(ctx.run_dir), owner=str(ctx.who), run=await ctx.compute(folder.identity)
    )
    writer = SnapshotWriter(ctx, memory, gathered_ranks=gathered_ranks(config.value))
    found = await writer.take_over()
    on_disk = await ctx.compute(list_checkpoints, folder.root)
    ctx.starting(loading(config.value.path or config.model.path))
    engine: ValueEngine = await ctx.prepare("value", build_value_engine, config)
    restored = await restore_snapshot(
        ctx, memory, found, on_disk, missing=ctx.ledger.missing, put_back=engine.put_back, counted=NUM_STEPS
    )
    if restored is not None:
        # settled here too: the writer of that checkpoint may have died before it did
        returned = await ctx.ledger.recover_finished(ctx.who, restored.settled, kept=restored.kept)
        snapshot = restored.snapshot
        return ValueBeginning(folder, engine, writer, snapshot.name, False, snapshot.state, restored.kept, returned)
    checkpoint = await ctx.compute(folder.newest)
    if checkpoint is not None:
        ctx.starting(f"loading checkpoint {checkpoint.path.name}")
        await ctx.compute(engine.load, checkpoint.path)
    state = checkpoint.state if checkpoint else {}
    returned = await ctx.ledger.recover_finished(ctx.who, tuple(state.get("claims", ())))
    name = f"checkpoint {checkpoint.path.name}" if checkpoint else "the start model"
    return ValueBeginning(folder, engine, writer, name, checkpoint is not None, state, (), returned)
