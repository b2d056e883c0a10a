"""Claims about a real fleet whose reward functions change while it runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.integration.fleet import EMULATED, RunningFleet, fleet

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

JUDGE = """
def judge(responses):
    return [{number} for one in responses]
"""
RAISES = """
def judge(responses):
    raise LookupError("of the new function")
"""
SMALL = (
    *EMULATED,
    "reward.functions.extra.verifier=my_rewards:judge",
    "run.num_updates=4000",
    "fleet.reward=2",
    "algorithm.groups_per_update=2",
    "algorithm.group_size=4",
    "ledger.scoring_deadline_s=3",
    "code.canary_pieces=6",
    "code.judged_updates=4",
)


def version(folder: Path, source: str) -> str:
    folder.mkdir()
    (folder / "my_rewards.py").write_text(source)
    return str(folder)


def parts(run: RunningFleet) -> list[float]:
    """The function's part of the reward, update by update."""
    lines = (run.run_dir / "history.jsonl").read_text().splitlines()
    rows: list[dict[str, Any]] = [row for row in map(json.loads, lines) if row["kind"] == "update"]
    return [row["reward_parts"]["extra"] for row in rows]


def test_reward_functions_change_while_a_run_goes_on_and_bad_ones_do_not_stay(tmp_path: Path) -> None:
    first = version(tmp_path / "first", JUDGE.format(number=0.25))
    second = version(tmp_path / "second", JUDGE.format(number=0.5))
    broken = version(tmp_path / "broken", "import no_such_module_of_ours\n")
    raises = version(tmp_path / "raises", RAISES)
    with fleet(tmp_path, *SMALL, f"reward.path=['{first}']") as run:
        folder = str(run.run_dir)
        run.wait_until(lambda: run.num_updates() >= 6, "updates")
        assert set(parts(run)) == {0.25}
        pids = {name: worker["pid"] for name, worker in run.workers().items()}
        complaint = run.refused("update", folder, "--code", broken)
        assert "no_such_module_of_ours" in complaint and "cannot be loaded" in complaint
        assert run.command("update", folder) == []
        # a good one comes to both workers, and to no other
        answer = run.command("update", folder, "--code", second, "--reason", "two is better")
        assert answer["is_taken"] is True
        assert [one["worker"] for one in answer["taken"]] == ["supervisor", "reward-0", "reward-1"]
        made = len(parts(run))
        run.wait_until(lambda: 0.5 in parts(run)[made:], "updates with the new function alone")
        now = {name: worker["pid"] for name, worker in run.workers().items()}
        assert {name for name in pids if now[name] != pids[name]} == {"reward-0", "reward-1"}
        assert run.refused("update", folder, "--code", second).count("is already in effect") == 1
        # one that raises on its first work goes back by itself
        answer = run.rolled_back("update", folder, "--code", raises)
        assert "LookupError: of the new function" in answer["undone_by"]["reason"]
        assert answer["undone_by"]["sets"]["code.rewards"] == json.dumps(version_of(run, 1))
        made = len(parts(run))
        run.wait_until(lambda: len(parts(run)) >= made + 5, "updates after the rollback")
        assert set(parts(run)[made:]) == {0.5}, "no response was judged by the function that raises"
        shown = run.command("update", folder)
        assert [one["change"]["undoes"] for one in shown] == [0, 0, 2]
        run.command("down", folder)
        audit = run.audit()
        assert audit["balances"] and not audit["groups"]["dropped"].get("dead_letter")


def version_of(run: RunningFleet, number: int) -> str:
    changes = run.command("update", str(run.run_dir))
    return changes[number - 1]["change"]["sets"]["code.rewards"].strip('"')
