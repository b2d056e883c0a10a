"""Claims about a joined host that stays for its run: it joins again when the run is resumed."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import msgspec
import pytest

from pipeline.config.load import read_resolved
from pipeline.process.exit_codes import ExitCode
from pipeline.runtime.registry.contract import RunState
from pipeline.supervisor.joining.home import MAX_ENTRY_BYTES
from pipeline.supervisor.joining.join import JoinRequest, join_and_stay
from pipeline.supervisor.joining.joined_folder import JoinedFolder
from pipeline.supervisor.joining.joined_supervisor import JoinOutcome
from pipeline.supervisor.joining.manifest import Manifest, encode_manifest
from protocol.ids import Role
from tests.pipeline.supervisor.joining.meeting import Meeting, meeting, until

pytestmark = pytest.mark.timeout(90)


async def stay(run: Meeting, place: JoinedFolder, waits: list[JoinOutcome], stay_s: float) -> JoinOutcome:
    request = JoinRequest(run.url, run.config.run.name, Role.GENERATOR, 1, wait_s=5.0)
    return await join_and_stay(request, lambda: run.join(place), stay_s=stay_s, stays=waits.append)


async def lives(run: Meeting, place: JoinedFolder, *, other_than: int = 0) -> int:
    """Return the process of this host's worker, once it is another."""

    async def other() -> int:
        beats = await run.registry.heartbeats_of([place.worker_name(Role.GENERATOR, 0)])
        return next((beat.pid for beat in beats if beat.pid != other_than), 0)

    return await until(other)


async def test_a_host_that_stays_joins_a_resumed_run_with_its_new_settings(
    tmp_path: Path, redis_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with meeting(tmp_path, redis_server, monkeypatch) as run:
        waits: list[JoinOutcome] = []

        async def has_stayed() -> bool:
            return len(waits) == 1

        async def long_is_home() -> bool:
            copy = run.run_dir / "logs" / long.name
            return copy.exists() and copy.stat().st_size == long.stat().st_size

        async def resume() -> None:
            first = await lives(run, place)
            # Longer than what is sent home at once.
            long.write_bytes(b"x" * (2 * MAX_ENTRY_BYTES) + b"\n")
            await until(long_is_home)
            await run.set(RunState.STOPPING, "stopped by the test")
            await until(has_stayed)
            manifest = msgspec.json.decode(await run.board.manifest(), type=Manifest)
            assert read_resolved(place.path).supervisor.max_restarts != 77
            manifest.settings["supervisor"]["max_restarts"] = 77
            # As a new start of the run's host does.
            await run.board.set_manifest(b"")
            await run.set(RunState.RUNNING)
            await asyncio.sleep(0.5)
            await run.board.set_manifest(encode_manifest(manifest))
            await lives(run, place, other_than=first)
            await run.set(RunState.FINISHED, "by the test")

        with run.claimed() as place:
            long = place.path / "logs" / f"{place.worker_name(Role.GENERATOR, 1)}.jsonl"
            async with asyncio.TaskGroup() as tasks:
                staying = tasks.create_task(stay(run, place, waits, 30.0))
                tasks.create_task(resume())
        outcome = staying.result()
        assert outcome.exit_code == ExitCode.OK and "finished: by the test" in outcome.detail
        assert "stopping: stopped by the test" in waits[0].detail and len(waits) == 1
        assert read_resolved(place.path).supervisor.max_restarts == 77
    name = f"{place.worker_name(Role.GENERATOR, 0)}.jsonl"
    log = (place.path / "logs" / name).read_bytes()
    assert log.count(b"worker_ended") == 2
    assert (run.run_dir / "logs" / name).read_bytes() == log, "each line came home once"
    assert (run.run_dir / "logs" / long.name).read_bytes() == long.read_bytes()


async def test_a_wait_for_a_resume_has_an_end_and_a_finished_run_is_not_waited_for(
    tmp_path: Path, redis_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with meeting(tmp_path, redis_server, monkeypatch) as run:
        for state, stay_s, num_waits in ((RunState.FINISHED, 30.0, 0), (RunState.FAILED, 0.3, 1)):
            await run.set(RunState.RUNNING)
            waits: list[JoinOutcome] = []
            with run.claimed() as place:
                async with asyncio.TaskGroup() as tasks:
                    staying = tasks.create_task(stay(run, place, waits, stay_s))
                    await lives(run, place)
                    ended_s = time.monotonic()
                    await run.set(state, "by the test")
            assert time.monotonic() - ended_s < 10.0
            assert staying.result().exit_code == ExitCode.OK and f"{state}: by the test" in staying.result().detail
            assert len(waits) == num_waits
