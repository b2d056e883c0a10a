"""Claims about the command line itself: light, with examples, and stern with typing errors."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from pipeline.cli import headrace
from protocol.errors import ConfigError
from tests.pipeline.cli.probe import run_command

COMMANDS = [
    [],
    *([name] for name in ("up", "down", "scale", "status", "top", "why", "samples", "score", "update")),
    *(["ledger", *name] for name in ([], ["queues"], ["groups"], ["versions"], ["drops"], ["trajectory"], ["audit"])),
    *(["ledger", name] for name in ("peek", "requeue", "dead-letters")),
    *(["run", *name] for name in ([], ["list"], ["report"], ["compare"], ["export"], ["logs"], ["trace"])),
    ["fleet"],
    *(["ledger", "dead-letters", name] for name in ("list", "show", "retry")),
    *(["fleet", "tokens", *name] for name in ([], ["create"], ["list"], ["revoke"], ["rotate"])),
    ["dev"],
    ["dev", "check-model"],
    ["config"],
    ["doctor"],
    ["init"],
    ["config", "check"],
    ["config", "show"],
    ["config", "explain"],
]
HEAVY = {"torch", "transformers", "vllm", "math_verify", "pyarrow", "huggingface_hub"}


@pytest.mark.parametrize("command", COMMANDS, ids=lambda words: " ".join(words) or "headrace")
def test_help_has_runnable_examples(command: list[str]) -> None:
    done = CliRunner().invoke(headrace, [*command, "--help"])
    assert done.exit_code == 0
    if command not in (["config"], ["ledger", "dead-letters"]):
        assert "Example" in done.output
        assert f"headrace {' '.join(command)}".strip() in done.output


@pytest.mark.parametrize("command", [*COMMANDS, ["run", "replay"], ["dev", "pretrain-value"]], ids=" ".join)
def test_help_fits_a_terminal_of_80_columns_and_is_not_cut(command: list[str]) -> None:
    done = CliRunner().invoke(headrace, [*command, "--help"], terminal_width=80)
    assert done.exit_code == 0
    lines = done.output.splitlines()
    is_cut = [line.endswith("...") and not line.startswith("Usage") for line in lines]
    assert [line for line, cut in zip(lines, is_cut, strict=True) if len(line) > 80 or cut] == []


@pytest.mark.parametrize("command", [[], ["up"], ["status"], ["score"], ["config", "check"]], ids=str)
def test_help_imports_nothing_heavy(command: list[str]) -> None:
    _, code, modules = run_command([*command, "--help"])
    assert code == 0
    assert HEAVY.isdisjoint(modules)
    assert not {"redis", "zmq", "pydantic", "rich"} & modules, "a --help needs click alone"


_COLLECTIONS = """
import gc
from pipeline.cli import main
before = sum(one["collections"] for one in gc.get_stats())
try:
    main(["update", "--settings"])
finally:
    print(sum(one["collections"] for one in gc.get_stats()) - before)
"""


def test_a_command_does_not_look_for_garbage_while_it_imports() -> None:
    done = subprocess.run([sys.executable, "-c", _COLLECTIONS], capture_output=True, text=True, timeout=60, check=False)
    assert "learner.learning_rate" in done.stdout
    assert int(done.stdout.split()[-1]) <= 2, "by Python's threshold there are 100 or more"


def _main(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pipeline.cli", *words], capture_output=True, text=True, timeout=60, check=False
    )


def test_the_old_name_of_a_benchmark_is_refused_with_the_new_one() -> None:
    done = CliRunner().invoke(headrace, ["bench", "overlap", "--json", "x"])
    assert done.exit_code == 2
    assert "python -m ops.bench" in done.output


RUN_COMMANDS = [
    *([name] for name in ("status", "why", "samples", "down")),
    *(["ledger", name] for name in ("queues", "audit")),
    *(["run", name] for name in ("report", "replay")),
    ["ledger", "dead-letters", "list"],
    ["ledger", "peek", "t.0.0.0"],
    ["scale", "generator=2"],
    ["ledger", "requeue", "t.0.0"],
    ["ledger", "dead-letters", "show", "t.0.0.0"],
    ["ledger", "dead-letters", "retry", "t.0.0.0"],
    ["fleet", "tokens", "list"],
    ["fleet", "tokens", "create", "--role", "reward"],
    ["fleet", "tokens", "revoke", "reward-1"],
    ["fleet", "tokens", "rotate", "reward-1"],
]


@pytest.mark.parametrize("command", RUN_COMMANDS, ids=" ".join)
def test_every_command_takes_its_run_as_a_word_and_by_name_but_one_run_only(command: list[str], tmp_path: Path) -> None:
    folder = str(tmp_path / "no-run")
    for given in ([folder], ["--run", folder]):
        with pytest.raises(ConfigError, match="no-run is not a run"):
            headrace.main([*command, *given], standalone_mode=False)
    with pytest.raises(click.UsageError, match="expected one run"):
        headrace.main([*command, folder, "--run", folder], standalone_mode=False)


@pytest.mark.parametrize(
    ("name", "told"), [("begun", r"has not written its config\.toml yet"), ("none", "there is no such folder")]
)
def test_a_run_without_its_configuration_yet_is_told_from_a_folder_that_is_missing(
    name: str, told: str, tmp_path: Path
) -> None:
    (tmp_path / "begun").mkdir()
    with pytest.raises(ConfigError, match=told):
        headrace.main(["down", str(tmp_path / name)], standalone_mode=False)


def test_a_run_in_the_present_folder_is_told_from_other_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / "config.toml").write_text("what = 'nothing'")
    with pytest.raises(ConfigError, match="what"):
        headrace.main(["ledger", "dead-letters", "show", "t.0.0.0", "demo"], standalone_mode=False)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["stauts"], "did you mean `headrace status`?"),
        (["queue"], "did you mean `headrace ledger queues`?"),
        (["run", "queues"], "did you mean `headrace ledger queues`?"),
        (["fleet", "xyzzy"], "expected join, tokens, place"),
        (["run", "bench"], "no command 'bench': expected list, report"),
        (["up"], "no run file given"),
        (["status", "/no/such/run"], "is not a run"),
        (["scale", "generator=0"], "expected ROLE=NUMBER"),
        (["scale", "learner=2"], "expected ROLE=NUMBER"),
        (["up", "/no/such.toml"], "no such file"),
        (["up", "--resume", "/no/such/run"], "is not a run"),
        (["ledger", "requeue"], "expected exactly one of"),
        (["ledger", "requeue", "81"], "expected LANE.GROUP.MEMBER"),
        (["ledger", "requeue", "--field", "rewards"], "expected reward, reference, value"),
        (["ledger", "dead-letters", "retry"], "or --all"),
        (["ledger", "dead-letters", "show"], "expected one chunk"),
        (["scale"], "expected ROLE=NUMBER"),
    ],
)
def test_a_wrong_command_is_one_sentence_and_exit_code_2(words: list[str], message: str) -> None:
    done = _main(*words)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
