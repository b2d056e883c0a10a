"""Small real update logs for tests: records, and whole segments."""

from __future__ import annotations

from pathlib import Path

from pipeline.ledger.types import ClaimedUnit
from pipeline.training.update_log.folder import LogWriter
from pipeline.training.update_log.records import Batch, Digests, Origin, Start, UpdateOutcome, pack_units
from tests.pipeline.algorithms.value_units import group_units, responses


def digests(state: str) -> Digests:
    """Weights of one tensor, different for every ``state``."""
    return {"weight": state.encode().ljust(16, b".")}


def start(
    state: str,
    *,
    num_updates: int = 0,
    version: int | None = None,
    state_version: int | None = None,
    origin: Origin = Origin.START_MODEL,
    checkpoint: str | None = None,
) -> Start:
    at = num_updates if version is None else version
    return Start(
        run="test", learner="learner#1", origin=origin, checkpoint=checkpoint,
        state_version=at if state_version is None else state_version, policy_version=at, num_updates=num_updates, config="",
        environment={}, seed=0, random_state={}, digests=digests(state), at_s=0.0,
    )  # fmt: skip


def units(seed: int = 0) -> list[ClaimedUnit]:
    return group_units(responses(seed, num_groups=2, group_size=2, longest=9), 4)


def append_update(
    writer: LogWriter, update: int, *, version: int | None = None, state: str | None = "", seed: int = 0
) -> None:
    """Append an update that makes ``version``; without an outcome when ``state`` is None."""
    made = update if version is None else version
    drawn = units(seed)
    writer.append(
        Batch(update=update, policy_version=made - 1, claim=f"c{made}", units=tuple(u.name for u in drawn), at_s=0.0)
    )
    for record in pack_units(drawn):
        writer.append(record)
    if state is not None:
        writer.append(
            UpdateOutcome(
                update=update, policy_version=made, refused=(), losses=(0.5,), grad_norms=(1.0,), applied=(True,),
                digests=digests(state or f"v{made}"),
            )
        )  # fmt: skip


def one_segment(folder: Path, num_updates: int = 3, *, sealed: bool = True) -> Path:
    """Write one segment from the start model; return its file."""
    writer = LogWriter(folder, epoch=1)
    writer.begin(start("v0"))
    for update in range(1, num_updates + 1):
        append_update(writer, update, seed=update)
    if sealed:
        writer.seal()
    writer.close()
    return next(folder.iterdir())
