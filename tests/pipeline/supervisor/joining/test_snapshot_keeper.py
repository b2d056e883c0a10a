"""A joined host copies the learner's snapshots over CURVE, and gives them back when the run's host
has lost its memory."""

from __future__ import annotations

import asyncio
import shutil
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from pipeline.process.work import Meter
from pipeline.runtime.clock import RealClock
from pipeline.runtime.registry.announcements import SnapshotPeer
from pipeline.runtime.registry.memory import MemoryRegistry
from pipeline.supervisor.joining.join import JoinRequest, join
from pipeline.supervisor.joining.joined_folder import JoinedFolder
from pipeline.supervisor.joining.snapshot_keeper import SnapshotKeeper
from pipeline.training.snapshots import SnapshotFolder, snapshots_folder
from protocol.ids import Role
from protocol.zeromq import CurveKeys, ZmqTransport
from tests.pipeline.op_config import op_config
from tests.pipeline.supervisor.joining.meeting import Meeting, fake_worker, meeting, until
from tests.pipeline.training.test_snapshots import live, write
from tests.transports import zmq_transport
from tests.workers.dying import Quiet
from workers.learner.peer_snapshots import peers_snapshots


async def held(run: Meeting, version: int) -> SnapshotPeer | None:
    """Return the peer once it has that version."""
    return next((one for one in await run.registry.snapshot_peers() if one.version == version), None)


async def brought(run: Meeting, folder: SnapshotFolder) -> list[int]:
    """Return the versions that a learner of the run's host gets from peers, over CURVE."""
    transport = ZmqTransport(
        "learner#2", high_water_mark=4, max_message_bytes=64 << 20, keys=CurveKeys.load_or_create(run.run_dir / "keys")
    )
    ctx = SimpleNamespace(
        config=run.config, registry=run.registry, transport=transport, run_dir=run.run_dir, log=Quiet(),
        starting=lambda _: None, compute=asyncio.to_thread, work=Meter(),
    )  # fmt: skip
    try:
        copies = peers_snapshots(cast("Any", ctx), folder, least_updates=0)
        found = [snapshot async for snapshot in copies]
        for snapshot in found:
            assert (folder.read(snapshot).tensors["wide"][1] == snapshot.manifest.version).all()
        return [snapshot.manifest.version for snapshot in found]
    finally:
        transport.close()


async def test_a_joined_host_gives_back_the_snapshots_that_the_runs_host_has_lost(
    tmp_path: Path, redis_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with meeting(tmp_path, redis_server, monkeypatch, "checkpoint.snapshot_peers=on") as run:
        root = snapshots_folder(run.run_dir)
        try:
            folder = SnapshotFolder(root, owner="learner#1", run="run")
            folder.take_over()
            write(folder, 1)

            async def lost() -> bool:
                """Copy two, lose the run's host's memory, and bring them back."""
                await until(lambda: held(run, 1))
                for version in (2, 3):
                    write(folder, version)
                peer = await until(lambda: held(run, 3))
                assert (peer.num_late, peer.endpoint.partition("://")[0]) == (1, "tcp")
                shutil.rmtree(root)
                second = SnapshotFolder(root, owner="learner#2", run="run")
                assert second.take_over() == []
                assert await brought(run, second) == [3, 1]
                # of its own host alone
                (run.run_dir / ".snapshot-secret").write_bytes(b"another run in the same folder")
                third = SnapshotFolder(root, owner="learner#3", run="run")
                third.take_over()
                assert await brought(run, third) == []
                return True

            with run.claimed() as place:
                request = JoinRequest(run.url, run.config.run.name, Role.GENERATOR, 1, wait_s=5.0)
                async with (
                    asyncio.timeout(60),
                    SnapshotKeeper(place, free_bytes=lambda: 1 << 40) as keeper,
                    asyncio.TaskGroup() as tasks,
                ):
                    tasks.create_task(join(request, place, command=fake_worker(), keeper=keeper))
                    await run.end_soon(lost)
        finally:
            shutil.rmtree(root, ignore_errors=True)


@pytest.mark.parametrize(
    ("setting", "free", "told"),
    [("auto", 1 << 40, ""), ("off", 1 << 40, ""), ("on", 1000, "GB are free"), ("on", 1 << 40, "Cannot allocate")],
)
async def test_nothing_is_copied_on_the_runs_own_host_or_without_room(
    setting: str, free: int, told: str, tmp_path: Path, redis_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In any case the join goes on."""

    def no_map(fd: int, length: int) -> None:
        raise OSError(12, "Cannot allocate memory")

    if "allocate" in told:
        monkeypatch.setattr("pipeline.supervisor.joining.snapshot_keeper.mmap", SimpleNamespace(mmap=no_map))
    async with meeting(tmp_path, redis_server, monkeypatch, f"checkpoint.snapshot_peers={setting}") as run:
        root = snapshots_folder(run.run_dir)
        complaints: list[str] = []
        asked: list[bool] = []
        offer = SnapshotKeeper._offer

        async def note(keeper: SnapshotKeeper, *args: Any, **kwargs: Any) -> Any:
            asked.append(True)
            return await offer(keeper, *args, **kwargs)

        monkeypatch.setattr(SnapshotKeeper, "_offer", note)
        monkeypatch.setattr(SnapshotKeeper, "_complain", lambda _, reason: complaints.append(reason))
        try:
            folder = SnapshotFolder(root, owner="learner#1", run="run")
            folder.take_over()
            write(folder, 1)

            async def looked() -> bool:
                if told:
                    return bool(complaints)
                return len(asked) > 1 or (setting == "off" and bool(await run.registry.heartbeats()))

            with run.claimed() as place:
                request = JoinRequest(run.url, run.config.run.name, Role.GENERATOR, 1, wait_s=5.0)
                async with (
                    asyncio.timeout(60),
                    SnapshotKeeper(place, free_bytes=lambda: free) as keeper,
                    asyncio.TaskGroup() as tasks,
                ):
                    tasks.create_task(join(request, place, command=fake_worker(), keeper=keeper))
                    await run.end_soon(looked)
                    assert not keeper._copies.held
            assert all(told in reason for reason in complaints)
            # the shelf holds nothing that the learner would wait for
            for version in range(2, 6):
                write(folder, version)
            assert folder.fill(live(6)) is not None
        finally:
            shutil.rmtree(root, ignore_errors=True)


async def test_at_most_two_joined_hosts_with_generators_keep_copies(tmp_path: Path) -> None:
    registry, clock = MemoryRegistry(RealClock()), time.time()

    def keeper(tag: str, role: Role = Role.GENERATOR) -> SnapshotKeeper:
        made = SnapshotKeeper(JoinedFolder(tmp_path, role, tag), free_bytes=lambda: 1 << 40)
        made._transport = zmq_transport(tag)
        return made

    first, second, third = keeper("a"), keeper("b"), keeper("c")
    places = [await one._has_place(cast("Any", registry)) for one in (first, second, third, first)]
    assert places == [True, True, False, True]
    # one that is gone makes room
    gone = next(one for one in await registry.snapshot_peers() if one.name == second._name)
    await registry.set_snapshot_peer(msgspec.structs.replace(gone, at_s=clock - 60.0))
    assert await third._has_place(cast("Any", registry))
    async with keeper("d", Role.REWARD) as scorer:
        scorer.begin(op_config(tmp_path), cast("Any", None), "")
        assert scorer._following is None
