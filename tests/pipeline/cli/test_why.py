"""``headrace why``, ``ledger requeue`` and ``ledger dead-letters`` against a run whose ledger holds work and a
dead letter."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from pipeline.cli import headrace
from pipeline.cli.why import render
from pipeline.fleet.why.explain import explain
from pipeline.fleet.why.silence import read_exits
from pipeline.operator.attached import Attached
from protocol.errors import ConfigError
from protocol.ids import ChunkId, Incarnation, Role, TrajectoryId
from protocol.trajectory import Field
from tests.pipeline.fleet.why.scenes import scene, silent, trajectory, unit, waits
from tests.pipeline.ledger.builders import make_chunk
from tests.pipeline.made_run import stopped_run

pytestmark = pytest.mark.timeout(90)
TRACEBACK = "Traceback (most recent call last):\n  ...\nValueError: no boxed answer"


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    async def leave_work_behind(at: Attached) -> None:
        who = await at.registry.register(Role.GENERATOR, "generator-0")
        scorer = Incarnation(Role.REWARD, "reward-9", 1)
        leases = (await at.ledger.lease(who, max_trajectories=8)).leases
        for lease in leases[:2]:
            await at.ledger.write_chunk(who, make_chunk(lease.trajectory))
        dead = ChunkId(TrajectoryId("t", 0, 0), 0)
        while not await at.ledger.fail_score(scorer, dead, Field.REWARD, TRACEBACK):
            pass
        await at.ledger.write_chunk(who, make_chunk(TrajectoryId("t", 1, 0)))

    return stopped_run(tmp_path_factory.mktemp("left"), leave_work_behind)


def _json(*words: str) -> Any:
    done = CliRunner().invoke(headrace, [*words, "--json"], standalone_mode=False)
    assert done.exception is None, done.output
    return json.loads(done.stdout)


def _refused(*words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        headrace.main(list(words), standalone_mode=False)
    return str(caught.value)


def test_a_run_that_nobody_works_on_says_how_to_go_on(run_dir: Path) -> None:
    found = _json("why", str(run_dir))
    assert set(found) == {"run", "state", "headline", "outlook", "chains", "also"}
    assert (found["outlook"], found["chains"][0]["cause"]) == ("you", "nobody")
    assert "headrace up --resume" in found["chains"][0]["next"]
    assert "1 dead letter: `headrace ledger dead-letters list`" in found["also"]


def test_work_is_put_back_by_worker_by_name_and_by_field_and_the_unknown_is_refused(run_dir: Path) -> None:
    run = ("--run", str(run_dir))
    assert _json("ledger", "requeue", "t.1.0", *run) == {"num_opened": 0, "num_due": 1, "unknown": []}
    assert _json("ledger", "requeue", "--field", "reward", *run)["num_due"] == 2
    assert _json("ledger", "requeue", "--worker", "generator-0", *run)["num_opened"] == 5
    assert _json("ledger", "requeue", "--worker", "generator-0", *run)["num_opened"] == 0
    assert "has registered with this run" in _refused("ledger", "requeue", "--worker", "generator-8", *run)
    assert "t.77.0: not in the ledger" in _refused("ledger", "requeue", "t.1.0", "t.77.0", *run)
    assert _json("ledger", "audit", str(run_dir))["balances"] is True


def test_dead_letters_are_listed_shown_and_retried_once_and_the_books_balance(run_dir: Path) -> None:
    run = ("--run", str(run_dir))
    (letter,) = _json("ledger", "dead-letters", "list", str(run_dir))
    assert (letter["chunk"], letter["role"], letter["prompt"]) == ("t.0.0.0", "reward", 0)
    assert _json("ledger", "dead-letters", "show", "t.0.0.0", *run)["error"] == TRACEBACK
    shown = CliRunner().invoke(headrace, ["ledger", "dead-letters", "list", str(run_dir)], standalone_mode=False)
    assert "no boxed answer" in shown.output
    assert "is not a dead letter" in _refused("ledger", "dead-letters", "show", "t.5.0.0", *run)
    assert "t.5.0.0: no dead letter" in _refused("ledger", "dead-letters", "retry", "t.5.0.0", *run)
    dropped = _json("ledger", "audit", str(run_dir))["groups"]["dropped"]
    assert dropped == {}, "its group goes on without it"
    assert _json("ledger", "dead-letters", "retry", "t.0.0.0", *run)["prompts"] == [0]
    assert _json("ledger", "dead-letters", "list", str(run_dir)) == []
    assert _json("ledger", "dead-letters", "retry", "--all", *run)["num_letters"] == 0
    assert {row["name"]: row["depth"] for row in _json("ledger", "queues", str(run_dir))}["again"] == 1
    audit = _json("ledger", "audit", str(run_dir))
    assert audit["balances"] is True
    assert audit["groups"]["dropped"] == dropped


def test_the_answer_fits_a_narrow_terminal() -> None:
    s = scene([silent("generator-2")], waits(unit("81", trajectory("t.81.4")), running=3))
    lines = render(s, explain(s), 60)
    assert lines[0].startswith("runs/demo: running, version 4; ")
    text = " ".join(" ".join(lines).split())
    assert "└ group 81 has 7 of 8 └ member 4 is on generator-2" in text
    assert "→ the supervisor replaces it after 10 s of silence" in text
    assert all(len(line) <= 60 for line in lines[1:] if "\x1b" not in line)


def test_a_workers_last_end_is_read_off_the_supervisors_log(tmp_path: Path) -> None:
    rows = [
        {"worker": "value", "event": "worker_exited", "meaning": "killed by SIGKILL", "at": "2026-11-21T12:00:00Z"},
        {
            "worker": "reward-0",
            "event": "worker_replaced",
            "reason": "no heartbeat for 11 s",
            "at": "2026-11-21T12:00:00Z",
        },
        {"worker": "reward-0", "event": "worker_exited", "meaning": "killed by SIGKILL", "at": "2026-11-21T12:00:01Z"},
        {"worker": "generator-0", "event": "worker_exited", "meaning": "failure", "at": "2026-11-21T11:00:00Z"},
        {"worker": "generator-0", "event": "worker_exited", "meaning": "failure", "at": "2026-11-21T11:59:58Z"},
        {
            "worker": "generator-0",
            "event": "worker_exited",
            "meaning": "failure",
            "error": "ImportError: no module named flash",
            "at": "2026-11-21T12:00:02Z",
        },
        {"event": "stopping", "at": "2026-11-21T12:00:01Z"},
    ]
    (tmp_path / "logs").mkdir()
    text = "torn" + "\n".join(["", *map(json.dumps, rows), '{"worker": "va'])
    (tmp_path / "logs" / "supervisor.jsonl").write_text(text)
    # 12:00:04
    now_s = 1795262404.0
    assert {worker: str(ended) for worker, ended in read_exits(tmp_path, now_s).items()} == {
        "value": "it ended (killed by SIGKILL), 4 s ago",
        "reward-0": "replaced, no heartbeat for 11 s, 4 s ago",
        "generator-0": "it ended (failure) by ImportError: no module named flash, 2 s ago, the 2nd time within 10 min",
    }
    assert read_exits(tmp_path / "nowhere", now_s) == {}


def test_a_pause_outlives_its_server_is_shown_everywhere_and_ends_with_resume(run_dir: Path) -> None:
    paused = _json("run", "pause", str(run_dir), "--reason", "a new  verifier\x1b[31m")["paused"]
    assert paused["by"].endswith(f"@{socket.gethostname()}")
    # each command starts and stops the run's server, or one on a copy
    assert _json("status", str(run_dir))["totals"]["paused"] == paused
    assert _json("run", "pause", str(run_dir), "--reason", "another")["paused"] == paused
    for command in (["status"], ["ledger", "queues"]):
        done = CliRunner().invoke(headrace, [*command, str(run_dir)], standalone_mode=False)
        words = " ".join(done.stdout.split())
        assert "admission is paused by an operator since" in words and "a new verifier\\x1b[31m" in words, words
    assert any("paused by an operator" in words for words in _json("why", str(run_dir))["also"])
    assert _json("run", "resume", str(run_dir)) == {"run": str(run_dir), "ended": paused}
    _json("run", "pause", str(run_dir))
    done = CliRunner().invoke(headrace, ["run", "resume", str(run_dir)], standalone_mode=False)
    assert f"{run_dir} admits groups again; admission was paused by an operator since" in done.stdout
    assert _json("run", "resume", str(run_dir))["ended"] is None
    assert _json("status", str(run_dir))["totals"]["paused"] is None
    assert "has 301 characters; expected at most 300" in _refused("run", "pause", str(run_dir), "--reason", "x" * 301)
