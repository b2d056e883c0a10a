"""Where a learner goes on from. Its host's memory, a peer's, and the disk each have something, or
have it damaged, or have nothing: a table of all cases."""

from __future__ import annotations

import asyncio
import itertools
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, cast

import msgspec
import numpy as np
import pytest
from structlog.testing import capture_logs

from pipeline.process.work import Meter, listening
from pipeline.supervisor.joining.joined_folder import JoinedFolder
from pipeline.supervisor.joining.snapshot_keeper import SnapshotKeeper
from pipeline.training.snapshot_copies import (
    BYTES,
    HeldCopy,
    SnapshotOffer,
    digest_of,
    sealed_copy,
    snapshot_secret,
)
from pipeline.training.snapshots import SnapshotFolder, sealed_manifests
from pipeline.training.update_log.records import Origin
from protocol.ids import Role
from tests.transports import zmq_transport
from tests.workers.dying import BATCH, Quiet, Reaper, World
from workers.learner.beginning import Beginning, begin
from workers.learner.peer_snapshots import peers_snapshots

Own = Literal["whole", "damaged", "none"]
Peer = Literal["whole", "damaged", "half", "foreign", "older", "silent", "none"]
NUM_UPDATES = 4


def over_tcp(world: World) -> None:
    """Let the world's learner ask peers; it serves no weights."""
    wire = world.config.wire.model_copy(update={"transport": "tcp", "host": "127.0.0.1"})
    weights = world.config.weights.model_copy(update={"path": "file"})
    world.config = world.config.model_copy(update={"wire": wire, "weights": weights})


def copies(world: World) -> list[HeldCopy]:
    """Return what a peer would have of the newest two snapshots, newest first."""
    secret = snapshot_secret(world.folder)
    found: list[HeldCopy] = []
    for path, manifest in sealed_manifests(world.folder / "snapshots"):
        data = np.frombuffer(path.read_bytes(), np.uint8).copy()
        offer = SnapshotOffer(f"copy-{len(found)}", manifest.decode(), data.size, "")
        found.append(HeldCopy(sealed_copy(offer, digest_of(data), secret), data))
    return found


def worsened(held: list[HeldCopy], peer: Peer) -> list[HeldCopy]:
    """Return the newest copy as a peer of that kind has it."""
    newest = held[0]
    match peer:
        case "damaged":
            newest.data[newest.data.size // 2] ^= 1
        case "foreign":
            newest = replace(newest, copy=msgspec.structs.replace(newest.copy, seal="00"))
        case "half":
            newest = replace(newest, data=newest.data[: newest.data.size // 2])
        case _:
            pass
    return [newest]


@asynccontextmanager
async def peer_of(world: World, held: list[HeldCopy], *, is_silent: bool) -> AsyncIterator[None]:
    """A joined host's keeper with these copies, served over a socket; a silent one has ended."""
    keeper = SnapshotKeeper(JoinedFolder(world.folder, Role.GENERATOR, "abc123"), free_bytes=lambda: 1 << 40)
    keeper._transport = zmq_transport("keeper")
    keeper._copies._held = held
    async with keeper:
        keeper._serve(world.config)
        await world.registry.set_snapshot_peer(keeper._record())
        if is_silent:
            keeper._transport.close()
        yield


def damage_own(world: World) -> None:
    for path in (world.folder / "snapshots").rglob("*.state"):
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)


def expected(own: Own, peer: Peer) -> str:
    if own == "whole":
        return "learner#1"
    return "peer" if peer == "whole" else "disk"


@pytest.mark.timeout(30)
@pytest.mark.parametrize(("own", "peer"), list(itertools.product(Own.__args__, Peer.__args__)))  # pyright: ignore[reportAttributeAccessIssue]
async def test_a_learner_goes_on_from_its_own_memory_then_a_peer_then_the_disk(
    own: Own, peer: Peer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path, monkeypatch, num_updates=NUM_UPDATES)
    over_tcp(world)
    if peer == "older":
        # a copy of the first update, which the checkpoint of the second has overtaken
        assert not await world.live(Reaper(1, "before step"))
        held = copies(world)
        assert not await world.live(Reaper(1, "before step"))
        assert not await world.live(Reaper(1, "before step"))
    else:
        assert not await world.live(Reaper(3, "before step"))
        held = [] if peer == "none" else worsened(copies(world), peer)
    if own == "damaged":
        damage_own(world)
    if own == "none":
        shutil.rmtree(tmp_path / "snapshots")
    begun: list[Beginning] = []

    async def note(ctx: Any) -> Beginning:
        begun.append(await begin(ctx))
        return begun[-1]

    monkeypatch.setattr("workers.learner.learner.begin", note)
    with capture_logs() as logs:
        async with peer_of(world, held, is_silent=peer == "silent"):
            trained = await world.live_until_done(Reaper(None))
    where = expected(own, peer)
    assert begun[0].origin is (Origin.CHECKPOINT if where == "disk" else Origin.SNAPSHOT)
    assert len(trained) == len(set(trained)) == NUM_UPDATES * BATCH, "nothing is trained twice, nothing lost"
    audit = await world.ledger.audit()
    assert audit.balances and audit.trajectories.trained == len(trained)
    if where == "peer":
        assert len(world.stepped) <= (NUM_UPDATES + 1) * BATCH, "at most one update is made again"
    reasons = [line["reason"] for line in logs if line["event"] == "snapshot refused"]
    if own == "damaged":
        assert any("its memory was changed" in reason for reason in reasons)


@pytest.mark.parametrize("piece", ["fetched", "checked", "written"])
async def test_a_start_reports_each_piece_of_a_snapshot_that_a_peer_has(
    piece: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that reports none for start_timeout_s is replaced."""
    world = World(tmp_path, monkeypatch, num_updates=NUM_UPDATES)
    over_tcp(world)
    assert not await world.live(Reaper(3, "before step"))
    [held, *_] = copies(world)
    sizes = {
        "fetched": ("pipeline.training.part_transfer.PART_BYTES", "pipeline.training.part_transfer._LEAST_BYTES"),
        "checked": ("pipeline.training.snapshot_copies._DIGESTED_BYTES",),
        "written": ("workers.learner.peer_snapshots._WRITTEN_BYTES",),
    }
    for name in sizes[piece]:
        monkeypatch.setattr(name, 64)
    meter = Meter()

    async def compute(function: Callable[..., Any], *args: Any) -> Any:
        with listening(meter):
            return function(*args)

    ctx = SimpleNamespace(
        config=world.config, registry=world.registry, transport=zmq_transport("learner"), run_dir=tmp_path, log=Quiet(),
        starting=lambda _: None, compute=compute, work=meter,
    )  # fmt: skip
    folder = SnapshotFolder(tmp_path / "elsewhere", owner="learner#2", run=held.copy.told.run)
    folder.take_over()
    async with asyncio.timeout(60), peer_of(world, [held], is_silent=False):
        found = [snapshot async for snapshot in peers_snapshots(cast("Any", ctx), folder, least_updates=0)]
    assert [snapshot.manifest.num_updates for snapshot in found] == [3]
    assert meter.report().steps >= held.data.size // 64 > 3


@pytest.mark.parametrize("peer", ["trickling", "too large"])
async def test_a_copy_that_never_comes_or_finds_no_memory_leaves_the_start_to_the_disk(
    peer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path, monkeypatch, num_updates=NUM_UPDATES)
    over_tcp(world)
    assert not await world.live(Reaper(3, "before step"))
    held = copies(world)
    shutil.rmtree(tmp_path / "snapshots")

    def no_memory(num_bytes: int, dtype: object) -> None:
        raise MemoryError

    if peer == "too large":
        monkeypatch.setattr("workers.learner.peer_snapshots.np", SimpleNamespace(empty=no_memory, uint8=np.uint8))
    else:
        answer = SnapshotKeeper._answer

        async def a_byte(keeper: SnapshotKeeper, request: Any) -> Any:
            is_part = request.digest.startswith(BYTES)
            return await answer(keeper, msgspec.structs.replace(request, max_bytes=1) if is_part else request)

        monkeypatch.setattr(SnapshotKeeper, "_answer", a_byte)
    begun: list[Beginning] = []

    async def note(ctx: Any) -> Beginning:
        begun.append(await begin(ctx))
        return begun[-1]

    monkeypatch.setattr("workers.learner.learner.begin", note)
    async with asyncio.timeout(60), peer_of(world, held, is_silent=False):
        trained = await world.live_until_done(Reaper(None))
    assert [one.origin for one in begun] == [Origin.CHECKPOINT]
    assert len(trained) == len(set(trained)) == NUM_UPDATES * BATCH


async def test_a_copy_that_is_not_gone_on_from_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path, monkeypatch, num_updates=NUM_UPDATES)
    over_tcp(world)
    assert not await world.live(Reaper(3, "before step"))
    held = copies(world)
    shutil.rmtree(tmp_path / "snapshots")
    refused: list[dict[str, Any]] = []

    class Log:
        def warning(self, event: str, **fields: Any) -> None:
            if event == "snapshot refused":
                refused.append(fields)

        def __getattr__(self, level: str) -> Any:
            return lambda *_, **__: None

    monkeypatch.setattr("tests.workers.dying.Quiet", Log)
    kinds: list[Peer] = ["damaged", "half", "foreign"]
    bad = [replace(one, data=one.data.copy()) for one in held[:1] * len(kinds)]
    wrong = [worsened([one], kind)[0] for one, kind in zip(bad, kinds, strict=True)]
    named = [
        replace(one, copy=msgspec.structs.replace(one.copy, id=kind)) for one, kind in zip(wrong, kinds, strict=True)
    ]
    async with asyncio.timeout(60), peer_of(world, named, is_silent=False):
        await world.live_until_done(Reaper(None))
    reasons = {line["snapshot"].split()[1]: line["reason"] for line in refused}
    assert reasons.keys() == set(kinds)
    assert "others than its host sealed" in reasons["damaged"]
    assert "its sender has it no more" in reasons["half"]
    assert "has not sealed it" in reasons["foreign"]
