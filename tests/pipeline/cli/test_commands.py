"""Claims about the commands on a run that has ended: they start its ledger for a look, and their
JSON is for scripts."""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from pipeline.cli import headrace
from pipeline.ledger.address import read_address
from pipeline.ledger.redis.ledger import RedisLedger
from pipeline.ledger.types import Audit, Balance
from pipeline.process.records import process_runs
from protocol.errors import ConfigError
from tests.pipeline.op_config import write_config
from tests.pipeline.supervisor.supervised import Run

pytestmark = pytest.mark.timeout(90)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = Run(tmp_path_factory.mktemp("ended"))
    run.when_live(run.interrupt)
    assert run.until_end().exit_code == 0
    return run.run_dir


def _json(*words: str, code: int = 0) -> Any:
    done = CliRunner().invoke(headrace, [*words, "--json"], standalone_mode=False)
    assert done.exception is None, done.output
    assert (done.return_value or 0) == code
    return json.loads(done.stdout)


def test_status_says_how_the_run_ended(run_dir: Path) -> None:
    found = _json("status", str(run_dir))
    assert set(found) == {
        "run",
        "state",
        "detail",
        "supervisor_pid",
        "roles",
        "workers",
        "totals",
        "waits",
        "clocks",
        "copies",
        "demand",
        "effective_time",
        "evicted",
        "standbys",
        "settings_change",
        "unreadable",
    }
    assert found["state"] == "stopping"
    assert found["supervisor_pid"] is None
    assert found["workers"] == []
    assert "credit_limit" in found["totals"]


def test_status_tells_the_progress_in_words(run_dir: Path) -> None:
    assert "update 0 of 4" in CliRunner().invoke(headrace, ["status", str(run_dir)], standalone_mode=False).output


def test_a_command_leaves_no_server_behind(run_dir: Path) -> None:
    _json("status", str(run_dir))
    address = read_address(run_dir)
    assert address is not None
    assert not process_runs(address.pid)


def test_queues_have_depth_limit_age_and_consumer(run_dir: Path) -> None:
    rows = _json("ledger", "queues", str(run_dir))
    wanted = {"name", "kind", "depth", "limit", "oldest_age_s", "waiting_for", "num_refused", "num_gaps"}
    assert rows
    assert all(set(row) == wanted for row in rows)


def test_audit_balances_with_exit_code_0_and_does_not_with_1(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = _json("ledger", "audit", str(run_dir))
    assert set(found) == {
        "balances",
        "difference",
        "groups",
        "trajectories",
        "tokens",
        "finished",
        "rework",
        "num_unflushed",
    }
    assert found["balances"] is True
    nothing = Balance(0, 0)

    async def broken(_: RedisLedger) -> Audit:
        return Audit(Balance(3, 1, {}, {"ready": 1}), nothing, nothing)

    monkeypatch.setattr(RedisLedger, "audit", broken)
    assert _json("ledger", "audit", str(run_dir), code=1)["difference"] == {
        "groups": 1,
        "trajectories": 0,
        "tokens": 0,
        "finished": 0,
    }
    done = CliRunner().invoke(headrace, ["ledger", "audit", str(run_dir)], standalone_mode=False)
    assert "does not balance" in done.output


def test_report_is_made_again(run_dir: Path) -> None:
    (run_dir / "report.html").unlink()
    found = _json("run", "report", str(run_dir))
    assert Path(found["report"]).exists()
    assert found["summary"]["num_updates"] == 0


def test_down_of_a_run_that_is_down_says_so(run_dir: Path) -> None:
    assert _json("down", str(run_dir)) == {"run": str(run_dir), "was_running": False}


def test_scale_of_a_run_that_is_down_and_peek_of_nothing_are_refused(run_dir: Path) -> None:
    for words in (
        ["scale", "generator=2", "--run", str(run_dir)],
        ["ledger", "peek", "t.0.0.0", "--run", str(run_dir)],
    ):
        with pytest.raises(ConfigError):
            headrace.main(words, standalone_mode=False)


def test_config_check_and_show(tmp_path: Path) -> None:
    path = str(write_config(tmp_path))
    assert _json("config", "check", path)["ok"] is True
    assert _json("config", "show", path, "--set", "run.seed=3")["run"]["seed"] == 3
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("learner.learning_rat=1", "did you mean `learner.learning_rate`?"),
        ("model.path=/no/such", "not a model"),
        ("data.train=['/no/such.jsonl']", "/no/such.jsonl"),
    ],
)
def test_up_with_a_wrong_setting_starts_nothing(tmp_path: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        headrace.main(["up", str(write_config(tmp_path)), "--set", override], standalone_mode=False)
    assert message in str(caught.value)
    assert not (tmp_path / "runs").exists()


def test_up_does_not_begin_a_run_twice_nor_resume_it_under_another_name(run_dir: Path, tmp_path: Path) -> None:
    config = str(run_dir / "config.toml")
    with pytest.raises(ConfigError, match="already holds a run"):
        headrace.main(["up", config], standalone_mode=False)
    with pytest.raises(ConfigError, match="ledger's keys have that name"):
        headrace.main(["up", "--resume", str(run_dir), "--set", "run.name=other"], standalone_mode=False)


def test_config_check_refuses_the_name_of_a_run_that_is_there_and_says_the_ways_on(run_dir: Path) -> None:
    with pytest.raises(ConfigError, match=r"already holds a run.*up --resume .*--set run\.name=OTHER"):
        headrace.main(["config", "check", str(run_dir / "config.toml")], standalone_mode=False)
    assert _json("config", "check", str(run_dir / "config.toml"), "--set", "run.name=other")["ok"] is True


def test_score_prints_the_distribution(tmp_path: Path) -> None:
    path = tmp_path / "responses.jsonl"
    path.write_text('{"response": "2", "answer": "2"}\n{"response": "3", "answer": "2"}\n')
    assert _json("score", str(path), "--verifier", "arithmetic")["accuracy"] == 0.5


def test_down_ends_a_running_fleet_gently_or_at_once(tmp_path: Path) -> None:
    for now in (False, True):
        folder = tmp_path / str(now)
        folder.mkdir()
        run = Run(folder)

        async def with_down(run: Run = run, now: bool = now) -> tuple[int, bytes]:
            import sys

            from pipeline.supervisor.run_folder import run_lock

            async def down() -> bytes:
                words = ["down", str(run.run_dir), "--json", *(["--now"] if now else [])]
                process = await asyncio.create_subprocess_exec(
                    sys.executable, "-m", "pipeline.cli", *words, stdout=asyncio.subprocess.PIPE
                )
                return (await process.communicate())[0]

            live = asyncio.Event()
            run.when_live(lambda _: live.set())
            async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:

                async def supervise() -> int:
                    with run_lock(run.run_dir):
                        return (await run.supervisor.run(run._watch, watch_every_s=0.1)).exit_code

                job = tasks.create_task(supervise())
                await live.wait()
                told = await down()
            return job.result(), told

        code, told = asyncio.run(with_down())
        assert code == (130 if now else 0)
        assert json.loads(told)["was_running"] is True
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
