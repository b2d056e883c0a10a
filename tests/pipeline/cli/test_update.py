"""Claims about the command ``headrace update``: its words, its answers and its usage errors."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from pipeline.cli import headrace
from pipeline.cli import update as update_command
from pipeline.config.changing import CHANGEABLE
from pipeline.supervisor.run_folder import run_lock
from protocol.ids import Role
from tests.pipeline.operator.small_run import SmallRun, small_run

GOOD = "def judge(responses):\n    return [1.0 for _ in responses]\n"


def invoked(*words: str) -> Result:
    return CliRunner().invoke(headrace, ["update", *words], catch_exceptions=False)


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a reward function, and a run whose ledger is in memory for each command."""

    @asynccontextmanager
    async def attach(_: Path | None) -> AsyncIterator[SmallRun]:
        run = await small_run(
            tmp_path, "reward.functions.extra.verifier=my_rewards:judge", f"reward.path=['{tmp_path}']"
        )
        await run.beat(Role.LEARNER, "learner", updates=2)
        await run.beat(Role.REWARD, "reward-0")
        with run_lock(run.run_dir):
            yield run

    monkeypatch.setattr(update_command, "attach", attach)
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "my_rewards.py").write_text(GOOD)
    return tmp_path / "new"


@pytest.mark.parametrize("is_lazy", [False, True])
def test_code_that_is_given_lazily_is_a_lazy_change_and_the_answer_says_so(source: Path, is_lazy: bool) -> None:
    words = ("--code", str(source), "--timeout", "0", *(["--lazily"] if is_lazy else []))
    result = CliRunner().invoke(headrace, ["update", *words], catch_exceptions=False, standalone_mode=False)
    # none supervises this run, so that nothing takes it
    assert result.return_value == 1, "the exit code"
    assert "code.rewards" in result.output and "supervisor: did not use it within 0 s" in result.output
    assert ("reward-0: did not use it" in result.output) is not is_lazy
    assert ("each worker uses it once it restarts; after code.lazy_limit_s" in result.output) is is_lazy


def test_the_answer_as_json_has_the_change_and_every_workers_answer(source: Path) -> None:
    result = invoked("--code", str(source), "--lazily", "--reason", "two is better", "--timeout", "0", "--json")
    found: dict[str, Any] = json.loads(result.output)
    assert found["change"]["is_lazy"] and found["change"]["reason"] == "two is better"
    assert found["taken"] == [{"worker": "supervisor", "is_taken": False, "first_update": 0}]
    assert found["is_taken"] is False and found["undone_by"] is None


def test_the_settings_that_may_change_are_listed_with_who_takes_them_and_when() -> None:
    result = invoked("--settings")
    assert result.exit_code == 0
    for line, (key, one) in zip(result.output.splitlines(), CHANGEABLE.items(), strict=True):
        assert line.startswith(key) and f"{one.role}, {one.when}" in line and one.effect in line
    rows = json.loads(invoked("--settings", "--json").output)
    assert {row["key"]: row["role"] for row in rows} == {key: str(one.role) for key, one in CHANGEABLE.items()}


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("--set", "learner.learning_rate=1", "--rollback"), "exclude each other: give one"),
        (("--set", "learner.learning_rate=1", "--code", "folder"), "exclude each other: give one"),
        (("--rollback", "--code", "folder"), "exclude each other: give one"),
        (("--lazily",), "--lazily is for new code"),
        (("--lazily", "--rollback"), "--lazily is for new code"),
        (("--timeout", "-1"), "--timeout"),
    ],
)
def test_words_that_do_not_go_together_are_refused_before_the_run_is_looked_for(
    words: tuple[str, ...], complaint: str
) -> None:
    result = invoked(*words)
    assert result.exit_code == 2 and complaint in result.output
