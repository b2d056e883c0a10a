"""Claims about a learner on several ranks in a whole fleet: it trains, and the death of any rank
costs nothing but time."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from pipeline.process.exit_codes import ExitCode
from tests.integration.fleet import RunningFleet, fleet

pytestmark = [pytest.mark.integration, pytest.mark.timeout(540)]

TWO_RANKS = (
    "run.num_updates=1000",
    "algorithm.groups_per_update=2",
    "algorithm.group_size=4",
    "data.evaluation=[]",
    "reference.always=false",
    "fleet.reference=0",
    "checkpoint.every_updates=2",
    "learner.backend=fsdp2",
    "learner.ranks=2",
    "fleet.generator=1",
)
ONE_PROCESS = ("learner.backend=torch", "learner.ranks=1", "learner.tensor_parallel=1")


def rank_pids(launcher: int) -> dict[int, int]:
    """Return the processes that a launcher started, by rank."""
    found: dict[int, int] = {}
    for child in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split():
        settings = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
        rank = next((entry for entry in settings if entry.startswith(b"RANK=")), None)
        if rank is not None:
            found[int(rank.removeprefix(b"RANK="))] = int(child)
    return found


def updates(run: RunningFleet) -> list[int]:
    lines = (run.run_dir / "history.jsonl").read_text().splitlines(keepends=True)
    rows = [json.loads(line) for line in lines if line.endswith("\n")]
    return [row["update"] for row in rows if row["kind"] == "update"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("ranks", "backend", "setting", "told"),
    [
        (2, "pipeline", "learner.pipeline.schedule=search", "2 stages on 2 ranks, found order"),
        (3, "fsdp2", "learner.tensor_parallel=3", "FSDP2, 3 ranks, layers split over 3"),
    ],
)
def test_a_fleet_trains_on_split_models_and_goes_on_in_one_process(
    tmp_path: Path, ranks: int, backend: str, setting: str, told: str
) -> None:
    split = ("run.num_updates=4", f"learner.backend={backend}", f"learner.ranks={ranks}", setting)
    with fleet(tmp_path, *TWO_RANKS, *split) as run:
        assert run.finish() == 0, run.output.read_text()
        assert told in run.output.read_text()
        assert updates(run) == [1, 2, 3, 4]
    with fleet(tmp_path, "run.num_updates=6", *ONE_PROCESS, resume=run.run_dir) as run:
        assert run.finish() == 0, run.output.read_text()
        assert updates(run) == [1, 2, 3, 4, 5, 6]
        assert run.audit()["balances"] is True


def test_a_fleet_trains_on_two_ranks_and_goes_on_after_one_of_them_is_killed(tmp_path: Path) -> None:
    with fleet(tmp_path, *TWO_RANKS) as run:
        run.wait_until(lambda: run.num_updates() >= 3, "the third update", 180.0)
        learner = run.workers()["learner"]
        ranks = rank_pids(learner["pid"])
        assert sorted(ranks) == [0, 1]
        os.kill(ranks[1], signal.SIGKILL)
        run.wait_until(lambda: run.workers().get("learner", {"epoch": -1})["epoch"] > learner["epoch"], "a new learner")
        last_lines = (run.run_dir / "logs" / "learner.out").read_text()
        assert f"learner: rank 1 of 2 (pid {ranks[1]}) was killed by SIGKILL" in last_lines
        told = [json.loads(line) for line in (run.run_dir / "logs" / "supervisor.jsonl").read_text().splitlines()]
        exits = [(row["worker"], row["exit_code"]) for row in told if row["event"] == "worker_exited"]
        assert exits == [("learner", ExitCode.ENGINE)]
        seen = updates(run)[-1]
        run.wait_until(lambda: updates(run)[-1] >= seen + 2, "updates after the death", 180.0)
        ready = [json.loads(line) for line in (run.run_dir / "logs" / "learner.jsonl").read_text().splitlines()]
        begun = [row["begun_from"].split(" of ")[0] for row in ready if row["event"] == "learner_ready"]
        assert begun == ["the start model", "snapshot"], "each rank's share was in it"
        assert run.audit()["balances"] is True
        run.command("down", str(run.run_dir))
        assert run.finish() == 0, run.output.read_text()
        audit = run.audit()
        assert audit["balances"] is True
        assert audit["groups"]["trained"] == 2 * len(set(updates(run)))
        assert not [pid for pid in ranks.values() if Path(f"/proc/{pid}").exists()]
