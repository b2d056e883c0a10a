"""Claims about a run of which everything is killed at once, the ledger's server included, and which
is then resumed."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from pipeline.ledger.address import read_address
from pipeline.process.records import process_runs
from tests.integration.fleet import EMULATED, RunningFleet, fleet

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

GROUPS, SIZE = 2, 4
ETA = 8
"""So large that no unit is too old only because the machine is slow. A unit still goes stale when
others overtake it."""
QUICK = (
    *EMULATED,
    "run.num_updates=1000",
    f"staleness.eta={ETA}",
    f"algorithm.groups_per_update={GROUPS}",
    f"algorithm.group_size={SIZE}",
    "generation.window_tokens=8",
    "checkpoint.every_updates=4",
    "checkpoint.keep=3",
    "ledger.lease_s=3",
    "ledger.scoring_deadline_s=3",
)


def updates(run: RunningFleet) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (run.run_dir / "history.jsonl").read_text().splitlines()]
    return [row for row in rows if row["kind"] == "update"]


def cut_the_power(run: RunningFleet) -> None:
    """Kill the supervisor, then every worker and the ledger's server, and wait until
    all are gone."""
    address = read_address(run.run_dir)
    assert address is not None
    pids = [worker["pid"] for worker in run.workers().values()]
    for pid in (run.process.pid, *pids, address.pid):
        os.kill(pid, signal.SIGKILL)
    run.process.wait(60)
    deadline = time.monotonic() + 60
    while any(map(process_runs, [*pids, address.pid])):
        assert time.monotonic() < deadline, "a killed process does not end"
        time.sleep(0.05)


def check_books(run: RunningFleet, num_updates: int) -> dict[str, Any]:
    """Check that all admitted work is trained on once, or dropped for a reason, and that the
    weights hold the trained units."""
    rows = updates(run)
    assert [row["update"] for row in rows] == list(range(1, num_updates + 1))
    versions = [row["policy_version"] for row in rows]
    assert versions == sorted(set(versions))
    assert max(row["staleness_max"] for row in rows) <= ETA
    audit = run.audit()
    assert audit["balances"] is True
    assert sum(audit["trajectories"]["in_flight"].values()) == 0
    assert (
        audit["trajectories"]["trained"] == sum(row["num_trajectories"] for row in rows) == num_updates * GROUPS * SIZE
    )
    assert audit["tokens"]["trained"] == sum(row["num_response_tokens"] for row in rows)
    return audit


def test_after_a_power_cut_trajectories_go_on_and_an_older_checkpoint_can_be_chosen(tmp_path: Path) -> None:
    with fleet(tmp_path, *QUICK) as run:
        run.wait_until(lambda: run.num_updates() >= 6, "the sixth update")
        cut_the_power(run)
        seen = run.num_updates()
    # by a server of the command's own, on the file that is left
    before = run.audit()
    assert before["balances"] is True
    begun = sum(before["tokens"]["in_flight"].values())
    assert begun > 0, "nothing was in flight: the test shows nothing"

    wanted = seen + 4
    with fleet(tmp_path, f"run.num_updates={wanted}", resume=run.run_dir) as resumed:
        assert resumed.finish() == 0, resumed.output.read_text()
    after = check_books(resumed, wanted)
    assert set(after["trajectories"]["dropped"]) <= {"no_signal", "cancelled"}, "what came back was too old"

    versions = sorted(int(path.name.rpartition("-")[2]) for path in (run.run_dir / "checkpoints").glob("[0-9]*"))
    chosen = versions[-2]
    assert chosen < versions[-1]
    with fleet(tmp_path, resume=run.run_dir, arguments=("--from-version", str(chosen))) as chosen_run:
        assert chosen_run.finish() == 0, chosen_run.output.read_text()
    last = check_books(chosen_run, wanted)
    assert last["trajectories"]["dropped"]["rolled_back"] > 0, "what later checkpoints had learned is not counted"
    assert list((run.run_dir / "checkpoints").glob("set-aside-*"))
