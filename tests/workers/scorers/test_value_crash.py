"""Claims about a value worker that dies, at every point where it can: each response is learned from
once, none is lost."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import pytest

import workers.scorers.value
from pipeline.config.runtime import CheckpointSection
from pipeline.training.checkpoints import VALUE_CHECKPOINTS, latest_checkpoint
from pipeline.training.live_states import BufferPages, LiveState
from pipeline.training.snapshots import KeptState
from pipeline.weights.tensorfile import TensorSpec
from protocol.ids import Role
from tests.pipeline.ledger.builders import SCORER, value
from tests.transports import zmq_transport
from tests.workers.dying import Killed, Mortal, MortalContext, Quiet, Reaper, chosen, mortal_disk, mortal_snapshots
from tests.workers.scorers.test_value_worker import BATCH, Fleet, ScriptedEngine
from workers.engines.value.seam import ValueSample, ValueStepResult
from workers.scorers.value import Value

NUM_BATCHES = 5


class Memory(ScriptedEngine):
    """A value engine whose weights are the list of its training samples."""

    trained: list[str]
    stepped: list[str]
    """Trained on in any life, in this order."""

    def step(self, samples: Sequence[ValueSample]) -> ValueStepResult:
        self.trained = [*self.trained, *(sample.name for sample in samples)]
        self.stepped += [sample.name for sample in samples]
        return super().step(samples)

    def snapshot(self) -> Callable[[Path], None]:
        text = json.dumps(self.trained)

        def write(folder: Path) -> None:
            (folder / "weights.json").write_text(text)

        return write

    def load(self, folder: Path) -> None:
        self.trained = json.loads((folder / "weights.json").read_text())
        self.num_steps = len(self.trained) // BATCH

    def live_state(self) -> LiveState:
        text = np.frombuffer(json.dumps(self.trained).encode(), np.uint8)

        def copy(pages: BufferPages) -> None:
            pages.arrays[0][:] = text

        return LiveState((TensorSpec("trained", "U8", (text.size,)),), "", copy)

    def put_back(self, kept: KeptState) -> None:
        self.trained = json.loads(bytes(kept.tensors["trained"][1]))
        self.num_steps = len(self.trained) // BATCH

    def close(self) -> None:
        pass


async def live(fleet: Fleet, monkeypatch: pytest.MonkeyPatch, reaper: Reaper) -> bool:
    """Be one value process on the finished responses; return whether it ended well."""
    who = await fleet.registry.register(Role.VALUE, "value")
    fleet.epochs["value"] = who.epoch
    restore = mortal_disk(reaper)
    mortal_snapshots(monkeypatch, reaper)
    worker: Value | None = None
    context: MortalContext | None = None
    try:
        async with asyncio.TaskGroup() as tasks:
            context = MortalContext(
                config=fleet.config,
                run_dir=fleet.folder,
                who=who,
                ledger=cast("Any", Mortal(fleet.ledger, "ledger", reaper)),
                registry=cast("Any", Mortal(fleet.registry, "registry", reaper)),
                transport=zmq_transport(str(who), high_water_mark=64),
                log=cast("Any", Quiet()),
                clock=fleet.clock,
                tasks=tasks,
            )
            context.reaper = reaper
            worker = Value(context)
            await worker.setup()
            while await worker._train():
                pass
            await worker.drain()
    except BaseExceptionGroup as group:
        if not reaper.is_dead:
            raise
        assert group.subgroup(Killed) is not None
        return False
    else:
        return True
    finally:
        restore()
        if context is not None:
            context.end_threads()
            context.close()
        for name in ("_folder", "_mailbox"):
            if hasattr(worker, name):
                getattr(worker, name).close()


async def check(
    folder: Path, monkeypatch: pytest.MonkeyPatch, reaper: Reaper, snapshots: Literal["on", "off"]
) -> list[str]:
    """Run to the end, dying once; return all that was trained on in any life."""
    stepped: list[str] = []

    def new_engine(_: object) -> Memory:
        engine = Memory()
        engine.trained, engine.stepped = [], stepped
        return engine

    fleet = Fleet(folder, monkeypatch)
    section = fleet.config.value.model_copy(update={"checkpoint_every_steps": 2})
    memory = CheckpointSection(snapshots=snapshots)
    fleet.config = fleet.config.model_copy(update={"value": section, "checkpoint": memory})
    monkeypatch.setattr(workers.scorers.value, "build_value_engine", new_engine)
    monkeypatch.setattr(workers.scorers.value, "value_snapshots_folder", lambda _: folder / "snapshots")
    await fleet.open()
    for chunk in await fleet.sample(NUM_BATCHES * BATCH):
        await fleet.ledger.write_score(SCORER, chunk.id, value())
    while not await live(fleet, monkeypatch, reaper):
        reaper = Reaper(None)
    newest = latest_checkpoint(folder / VALUE_CHECKPOINTS)
    assert newest is not None
    trained = json.loads((newest.path / "weights.json").read_text())
    assert len(trained) == len(set(trained)) == NUM_BATCHES * BATCH
    audit = await fleet.ledger.audit()
    assert audit.balances
    assert audit.finished.trained == len(trained)
    assert not audit.finished.dropped and not sum(audit.finished.in_flight.values())
    rows = fleet.rows()
    assert [row.step for row in rows] == list(range(1, NUM_BATCHES + 1))
    versions = [row.value_version for row in rows]
    assert versions == sorted(set(versions))
    return stepped


@pytest.mark.timeout(300)
@pytest.mark.parametrize("in_any_step", [False, pytest.param(True, marks=pytest.mark.long)])
@pytest.mark.parametrize("snapshots", ["on", "off"])
async def test_a_value_worker_killed_at_any_point_learns_from_everything_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, snapshots: Literal["on", "off"], in_any_step: bool
) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)
    whole = Reaper(None)
    await check(tmp_path / "whole", monkeypatch, whole, snapshots)
    sealed = ("_lend", "before copy", "before seal") if snapshots == "on" else ()
    for needed in ("claim_finished", "step", "snapshot", "rename", "settle_finished", "recover_finished", *sealed):
        assert any(needed in name for name in whole.points), f"no point at {needed}"
    points = whole.points
    # the fourth step ends with the second checkpoint
    for at in range(len(points)) if in_any_step else chosen(points, "before ledger.claim_finished", 4):
        folder = tmp_path / str(at)
        try:
            stepped = await check(folder, monkeypatch, Reaper(at), snapshots)
            if snapshots == "on":
                assert len(stepped) <= (NUM_BATCHES + 1) * BATCH, "at most one step is made again"
        except BaseException as error:
            error.add_note(f"killed at point {at} of {len(points)}: {points[at]}")
            raise
        shutil.rmtree(folder)
