"""Claims about the supervisor that comes after one that was killed."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pipeline.fleet.status import RunSnapshot
from pipeline.ledger.address import read_address, read_ledger_url
from pipeline.ledger.redis.client import connect
from pipeline.process.exit_codes import ExitCode
from pipeline.process.records import process_runs
from pipeline.runtime.registry.contract import Heartbeat
from pipeline.runtime.registry.redis import RedisRegistry
from protocol.errors import LedgerMismatch
from tests.pipeline.supervisor.supervised import LIMIT_S, Run

pytestmark = pytest.mark.timeout(90)


@contextmanager
def killed_supervisor(folder: Path, *overrides: str, **scripts: str) -> Iterator[tuple[Path, dict[str, Heartbeat]]]:
    """A run whose supervisor was killed with -9 when its three workers lived; yields its folder and
    their heartbeats."""
    words = [f"{role}={word}" for role, word in scripts.items()]
    command = [
        sys.executable,
        "-m",
        "tests.pipeline.supervisor.supervised",
        str(folder),
        *overrides,
        "--scripts",
        *words,
    ]
    supervisor = subprocess.Popen(command, start_new_session=True)
    run_dir = folder / "runs" / "op"
    beats: dict[str, Heartbeat] = {}
    deadline = time.monotonic() + LIMIT_S
    while len(beats) < 3:
        assert time.monotonic() < deadline, "the workers did not come"
        assert supervisor.poll() is None
        time.sleep(0.1)
        if read_address(run_dir) is not None:
            beats = heartbeats(run_dir)
    supervisor.kill()
    supervisor.wait()
    try:
        yield run_dir, beats
    finally:
        for beat in beats.values():
            if process_runs(beat.pid):
                os.kill(beat.pid, signal.SIGKILL)


def heartbeats(run_dir: Path) -> dict[str, Heartbeat]:
    async def look() -> dict[str, Heartbeat]:
        registry = RedisRegistry(connect(read_ledger_url(run_dir)), "op")
        try:
            return {beat.who.worker: beat for beat in await registry.heartbeats()}
        finally:
            await registry.aclose()

    return asyncio.run(look())


def test_a_successor_of_a_killed_supervisor_adopts_the_workers_and_cares_for_them(tmp_path: Path) -> None:
    with killed_supervisor(tmp_path) as (run_dir, left):
        assert all(process_runs(beat.pid) for beat in left.values()), "they outlived their supervisor"
        successor = Run(tmp_path, resume=True)
        seen: list[dict[str, Heartbeat]] = []

        def react(snapshot: RunSnapshot) -> None:
            seen.append({beat.who.worker: beat for beat in snapshot.workers})
            now = seen[-1]
            if len(seen) == 5:
                assert {name: (b.pid, b.who.epoch) for name, b in now.items()} == {
                    name: (b.pid, b.who.epoch) for name, b in left.items()
                }, "nobody was started, nobody fenced"
                os.kill(left["generator-0"].pid, signal.SIGKILL)
            elif len(seen) > 5 and "generator-0" in now and now["generator-0"].pid != left["generator-0"].pid:
                assert now["learner"].pid == left["learner"].pid
                successor.interrupt(snapshot)

        successor.react = react
        assert successor.until_end().exit_code == ExitCode.OK
        assert not any(process_runs(beat.pid) for beat in [*left.values(), *seen[-1].values()])
        assert not list((run_dir / "processes").glob("*[!e].json")), "nothing is left on record"


def test_an_adopted_learners_own_exit_code_is_the_runs(tmp_path: Path) -> None:
    with killed_supervisor(tmp_path, learner="starve-later") as (run_dir, left):
        # were it started anew, it would end with 2
        successor = Run(tmp_path, resume=True, learner="config")
        successor.when_live(lambda _: (run_dir / "starve").touch())
        assert successor.until_end().exit_code == ExitCode.STARVED
        assert not process_runs(left["learner"].pid)


def test_workers_of_other_settings_are_drained_first_and_started_with_the_new_ones(tmp_path: Path) -> None:
    with killed_supervisor(tmp_path) as (_, left):
        successor = Run(tmp_path, "generation.temperature=0.5", resume=True)

        def react(snapshot: RunSnapshot) -> None:
            fresh = [beat for beat in snapshot.workers if beat.pid != left[beat.who.worker].pid]
            if len(fresh) >= 3:
                assert not any(process_runs(beat.pid) for beat in left.values())
                successor.interrupt(snapshot)

        successor.react = react
        assert successor.until_end().exit_code == ExitCode.OK


def test_a_successor_that_cannot_begin_leaves_everything_as_it_was(tmp_path: Path) -> None:
    with killed_supervisor(tmp_path) as (run_dir, left):
        with pytest.raises(LedgerMismatch):
            Run(tmp_path, "algorithm.group_size=8", resume=True).until_end()
        before = heartbeats(run_dir)
        assert {name: beat.pid for name, beat in before.items()} == {name: beat.pid for name, beat in left.items()}
        successor = Run(tmp_path, resume=True)
        successor.when_live(successor.interrupt)
        assert successor.until_end().exit_code == ExitCode.OK
