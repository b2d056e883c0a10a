"""Claims about a joined host whose disk is full: a sentence with the folder, and others go on."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from pipeline.process.exit_codes import ExitCode, exit_code_of
from pipeline.process.records import process_runs
from pipeline.runtime.registry.contract import RunState
from pipeline.supervisor.joining.joined_folder import claimed_folder
from protocol.errors import StorageFailed
from protocol.ids import Role
from tests.pipeline.supervisor.joining.meeting import Meeting, meeting, until
from tests.small_disk import SmallDisk, small_disk

pytestmark = pytest.mark.timeout(90)


async def refused_join(run: Meeting, base: Path) -> str:
    """Return the sentence by which a join ends that finds no room."""
    with (
        pytest.raises(StorageFailed) as refused,
        claimed_folder(base, run.config.run.name, Role.GENERATOR) as place,
    ):
        await run.join(place)
    assert exit_code_of(refused.value) is ExitCode.HOST_FAILED
    return str(refused.value)


async def join_without_room(run: Meeting, disk: SmallDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    # The folder's own files: tag, keys, address, configuration.
    for num_pages in range(5):
        disk.leave(num_pages)
        base = disk.folder / str(num_pages)
        told = await refused_join(run, base)
        assert f"{base}/generator-" in told and "cannot be written to: No space left on device; make room" in told
    # The files that come from the run's host.
    disk.leave(1)
    monkeypatch.setenv("XDG_CACHE_HOME", str(disk.folder / "cache"))
    told = await refused_join(run, run.folder / "joined")
    assert f"{disk.folder}/cache/headrace/files cannot hold " in told and "set XDG_CACHE_HOME" in told


async def test_a_host_without_room_joins_nothing_and_the_others_work_on(
    tmp_path: Path, redis_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with meeting(tmp_path, redis_server, monkeypatch) as run:
        with small_disk(tmp_path / "small") as disk, run.claimed() as healthy:
            async with asyncio.TaskGroup() as tasks:
                joining = tasks.create_task(run.join(healthy))
                [beat] = await until(run.registry.heartbeats)
                await join_without_room(run, disk, monkeypatch)
                assert not joining.done() and process_runs(beat.pid), "the host with room is as it was"
                await run.set(RunState.FINISHED, "by the test")
        assert joining.result().exit_code == ExitCode.OK
        assert "finished: by the test" in joining.result().detail
