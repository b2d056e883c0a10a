"""Claims about a supervisor that takes over a fleet while the ledger's server dies."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis

from pipeline.ledger.address import read_address
from pipeline.process.records import process_runs
from tests.integration.fleet import EMULATED, RunningFleet, fleet

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

STEADY = (
    *EMULATED,
    "run.num_updates=1000",
    "algorithm.groups_per_update=2",
    "algorithm.group_size=4",
    "algorithm.max_generation_batches=0",
    "checkpoint.every_updates=1000",
)


def test_a_resume_whose_server_dies_twice_keeps_the_workers_and_the_run_goes_on(tmp_path: Path) -> None:
    with fleet(tmp_path, *STEADY) as run:
        run.wait_until(lambda: run.num_updates() >= 2, "the second update")
        before = pids(run)
        run.process.kill()
        run.process.wait()
        with connections(run) as known, fleet(tmp_path, resume=run.run_dir) as resumed:
            soon(resumed, lambda: connections_since(run, known), "the new supervisor's first connection")
            first = kill_server(run)
            soon(resumed, lambda: "workers_adopted" in resumed.output.read_text(), "the adoption")
            second = kill_server(run)
            assert first != second, "the server was started again in between"
            made = resumed.num_updates()
            resumed.wait_until(lambda: resumed.num_updates() >= made + 2, "two more updates")
            resumed.wait_until(lambda: " running 0:" in resumed.output.read_text(), "the end of the start")
            assert pids(resumed) == before, "adopted as they were"
            assert all(process_runs(pid) for pid in before.values())
            resumed.command("down", str(resumed.run_dir))
            assert resumed.finish() == 0, resumed.output.read_text()
            assert resumed.audit()["balances"] is True


def pids(run: RunningFleet) -> dict[str, int]:
    return {name: worker["pid"] for name, worker in run.workers().items()}


def server_pid(run: RunningFleet) -> int:
    address = read_address(run.run_dir)
    assert address is not None
    return address.pid


def kill_server(run: RunningFleet) -> int:
    """Kill the ledger's server as soon as it has a process; return its id."""
    deadline = time.monotonic() + 20.0
    while not process_runs(pid := server_pid(run)):
        assert time.monotonic() < deadline, f"no server for 20 s:\n{run.output.read_text()[-4000:]}"
        time.sleep(0.005)
    os.kill(pid, signal.SIGKILL)
    return pid


@contextmanager
def connections(run: RunningFleet) -> Iterator[int]:
    """Yield the newest connection's number."""
    address = read_address(run.run_dir)
    assert address is not None
    with redis.Redis.from_url(address.url) as client:
        yield client.client_id()


def connections_since(run: RunningFleet, known: int) -> bool:
    address = read_address(run.run_dir)
    assert address is not None
    with redis.Redis.from_url(address.url, single_connection_client=True) as client:
        own = client.client_id()
        return any(known < int(row["id"]) < own and row["cmd"] != "client|id" for row in client.client_list())


def soon(run: RunningFleet, condition: Callable[[], bool], what: str) -> None:
    """Poll a moment of the start that does not last."""
    deadline = time.monotonic() + 60.0
    while not condition():
        assert run.process.poll() is None, run.output.read_text()
        assert time.monotonic() < deadline, f"{what} did not come within 60 s:\n{run.output.read_text()[-4000:]}"
        time.sleep(0.005)
