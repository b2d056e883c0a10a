"""When snapshots are taken, left out, or given up; and that the worker waits for none of it."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
from structlog.testing import capture_logs

from pipeline.config.runtime import CheckpointSection
from pipeline.preflight.memory_needs import Room
from pipeline.runtime.actor import ActorContext
from pipeline.runtime.clock import RealClock
from pipeline.training.live_states import BufferPages, LiveState, StateLoan
from pipeline.training.snapshots import SnapshotFolder, read_manifest
from protocol.ids import Role
from tests.oracle.registry import MemoryRegistry
from tests.pipeline.runtime.fakes import context_of, small_config
from tests.pipeline.training.test_snapshots import live, write
from tests.transports import zmq_transport
from workers import snapshots
from workers.snapshots import SnapshotWriter

NUM_BYTES = live(1).num_bytes
PLENTY = Room(1 << 40, 1 << 40, 1 << 40)


@dataclass
class Writing:
    """A worker with a writer of snapshots, and the lines of its log."""

    ctx: ActorContext
    writer: SnapshotWriter
    root: Path
    logs: list[Any]

    async def start_snapshot(self, version: int, of: Callable[[], LiveState] | None = None) -> None:
        """Take the snapshot of an update."""
        await self.writer.start_snapshot(
            of or (lambda: live(version)), {"claims": {}}, version=version, num_updates=version
        )

    async def kept(self, version: int, of: Callable[[], LiveState] | None = None) -> None:
        """Take one, and wait for it."""
        await self.start_snapshot(version, of)
        await self.writer.wait()

    @property
    def versions(self) -> list[int]:
        """The sealed ones, newest first."""
        found = [read_manifest(path.read_bytes().rpartition(b"\n")[0]) for path in self.root.glob("*/*.json")]
        return [told.version for told in sorted(found, key=lambda told: told.at_s, reverse=True)]

    @property
    def off(self) -> list[str]:
        """Reasons for which snapshots were given up."""
        return [line["reason"] for line in self.logs if line["event"] == "snapshots_off"]

    def count(self, name: str) -> float:
        return self.ctx.counters.get(name, 0.0)


@asynccontextmanager
async def writing(
    tmp_path: Path,
    setting: Literal["auto", "on", "off"] = "auto",
    *,
    gathered_ranks: int = 1,
    room: Callable[[], Room] = lambda: PLENTY,
) -> AsyncIterator[Writing]:
    clock = RealClock()
    config = small_config(tmp_path).model_copy(update={"checkpoint": CheckpointSection(snapshots=setting)})
    with capture_logs() as logs:
        async with asyncio.TaskGroup() as tasks:
            settings = (config, tmp_path, Role.LEARNER, "learner", tasks)
            ctx = await context_of(*settings, MemoryRegistry(clock), zmq_transport(), clock)
            folder = SnapshotFolder(tmp_path / "snapshots", owner=str(ctx.who), run="run")
            writer = SnapshotWriter(ctx, folder, gathered_ranks=gathered_ranks, room=room)
            await writer.take_over()
            yield Writing(ctx, writer, tmp_path / "snapshots", logs)
            await ctx.cancel_spawned()
            ctx.close()


class SlowCopy:
    """A copy that ends when a test lets it."""

    def __init__(self) -> None:
        self.may_end = threading.Event()
        self.loans: list[StateLoan] = []

    def live(self) -> LiveState:
        def copy(pages: BufferPages) -> None:
            assert self.may_end.wait(60.0)
            live(1).copy(pages)

        return LiveState(live(1).specs, "note", copy, lambda loan, _: self.loans.append(loan))


def failing(error: Exception) -> tuple[Callable[[], LiveState], list[StateLoan]]:
    """Return a state whose copy fails, and its loans."""
    loans: list[StateLoan] = []

    def copy(pages: BufferPages) -> None:
        pages.arrays[0][:100] = 1
        raise error

    return lambda: LiveState(live(1).specs, "", copy, lambda loan, _: loans.append(loan)), loans


# -- whether they are taken ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("free", "shared", "is_taken"),
    [
        (3 * NUM_BYTES, 3 * NUM_BYTES, True),
        (3 * NUM_BYTES - 1, 3 * NUM_BYTES, False),
        (3 * NUM_BYTES, 3 * NUM_BYTES - 1, False),
        (3 * NUM_BYTES, None, False),
    ],
)
async def test_auto_takes_snapshots_where_three_times_their_size_is_free(
    tmp_path: Path, free: int, shared: int | None, is_taken: bool
) -> None:
    rooms = [Room(1 << 40, free, shared)]
    async with writing(tmp_path, room=lambda: rooms.pop()) as one:
        for version in (1, 2):
            # the second does not look for room again: there would be none to look at
            await one.kept(version)
        assert one.versions == ([2, 1] if is_taken else [])
        assert one.count("snapshots") == (2 if is_taken else 0)
        if is_taken:
            assert not one.off and one.count("snapshot_version") == 2
        else:
            [reason] = one.off
            assert "must be free, also in /dev/shm" in reason


async def test_on_takes_snapshots_without_a_look_at_the_room(tmp_path: Path) -> None:
    async with writing(tmp_path, "on", room=lambda: Room(0, 0, 0)) as one:
        await one.kept(1)
        assert one.versions == [1] and not one.off


@pytest.mark.parametrize(("setting", "is_taken"), [("auto", False), ("on", True)])
async def test_ranks_whose_state_is_gathered_take_snapshots_only_when_set_to_on(
    tmp_path: Path, setting: Literal["auto", "on"], is_taken: bool
) -> None:
    async with writing(tmp_path, setting, gathered_ranks=2) as one:
        await one.kept(1)
        assert one.versions == ([1] if is_taken else [])
        assert [("gather the state of the 2 ranks" in reason) for reason in one.off] == ([] if is_taken else [True])


async def test_off_takes_none_and_removes_those_of_a_former_setting(tmp_path: Path) -> None:
    before = SnapshotFolder(tmp_path / "snapshots", owner="learner#0", run="run")
    before.take_over()
    write(before, 1)
    async with writing(tmp_path, "off") as one:
        await one.kept(2)
        assert not one.root.exists() and not one.off


# -- beside the work -------------------------------------------------------------------------------


async def test_the_worker_goes_on_during_a_copy_and_a_snapshot_that_is_due_is_left_out(
    tmp_path: Path,
) -> None:
    slow = SlowCopy()
    async with writing(tmp_path, "on") as one:
        await one.start_snapshot(1, slow.live)
        assert one.versions == [] and not slow.loans[0].is_over
        await one.start_snapshot(2)
        assert one.count("skipped_snapshots") == 1
        slow.may_end.set()
        await one.writer.wait()
        assert one.versions == [1] and slow.loans[0].is_over
        await one.kept(3)
        assert one.versions == [3, 1]
        assert (one.count("snapshots"), one.count("skipped_snapshots")) == (2, 1)


async def test_the_wait_of_the_engine_counts_as_the_snapshots(tmp_path: Path) -> None:
    slow = SlowCopy()
    async with writing(tmp_path, "on") as one:
        await one.start_snapshot(1, slow.live)
        before_s = one.count("snapshot_s")
        slow.may_end.set()
        await one.writer.wait()
        slow.loans[0].waited_s = 100.0
        for version in (2, 3):
            await one.kept(version)
        assert 100.0 < one.count("snapshot_s") - before_s < 200.0, "once"


async def test_a_drain_waits_for_a_snapshot_and_not_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = SlowCopy()
    async with writing(tmp_path, "on") as one:
        await one.start_snapshot(1, slow.live)
        with monkeypatch.context() as patch:
            patch.setattr(snapshots, "_SEAL_S", 0.01)
            await one.writer.wait()
        assert one.versions == []
        slow.may_end.set()
        await one.writer.wait()
        assert one.versions == [1]


# -- given up --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (OSError(5, "Input/output error"), "Input/output error"),
        (RuntimeError("CUDA error"), "CUDA error"),
        (MemoryError(), "MemoryError"),
    ],
)
async def test_a_copy_that_fails_ends_its_loan_and_snapshots_are_off_which_is_told_once(
    tmp_path: Path, error: Exception, told: str
) -> None:
    state, loans = failing(error)
    async with writing(tmp_path, "on") as one:
        await one.kept(1)
        await one.kept(2, state)
        for version in (3, 4):
            await one.kept(version)
        [reason] = one.off
        assert told in reason
        assert loans[0].is_over
        assert not list(one.root.rglob("*.state")), "their memory goes back"
        assert one.count("snapshots") == 1


async def test_without_room_for_two_buffers_snapshots_are_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, offset: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    async with writing(tmp_path, "on") as one:
        for version in (1, 2):
            await one.kept(version)
        [reason] = one.off
        assert "No space" in reason


async def test_a_writer_whose_folder_was_taken_over_seals_nothing_and_says_so_once(tmp_path: Path) -> None:
    slow = SlowCopy()
    async with writing(tmp_path, "on") as one:
        await one.kept(1)
        await one.start_snapshot(2, slow.live)
        successor = SnapshotFolder(one.root, owner="learner#9", run="run")
        found = successor.take_over()
        slow.may_end.set()
        await one.writer.wait()
        await one.kept(3)
        [reason] = one.off
        assert "a newer incarnation has taken over the folder" in reason
        assert [snapshot.manifest.version for snapshot in found] == [1]
        assert (successor.read(found[0]).tensors["wide"][1] == 1).all()


async def test_a_folder_of_another_user_leaves_the_worker_without_snapshots(tmp_path: Path) -> None:
    (tmp_path / "snapshots").mkdir(mode=0o755)
    async with writing(tmp_path, "on") as one:
        await one.kept(1)
        [reason] = one.off
        assert "chmod 700" in reason


async def test_a_snapshot_is_sealed_after_what_it_waits_for_and_its_loan_ends_before(tmp_path: Path) -> None:
    may_end = threading.Event()
    async with writing(tmp_path) as one:
        await one.writer.start_snapshot(
            lambda: live(1), {"claims": {}}, version=1, num_updates=1, after=lambda: assert_set(may_end)
        )
        loan = one.writer._loan
        assert loan is not None
        await asyncio.to_thread(loan.join, 30.0)
        assert loan.is_over and one.versions == []
        may_end.set()
        await one.writer.wait()
        assert one.versions == [1]


def assert_set(event: threading.Event) -> None:
    assert event.wait(30.0)
