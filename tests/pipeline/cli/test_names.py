"""Claims about the names of commands: what people use daily, groups, and the names of before."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import click.shell_completion
import pytest
from click.testing import CliRunner, Result

from pipeline.cli import RENAMED, headrace

DAILY = [
    "init",
    "try",
    "up",
    "down",
    "top",
    "status",
    "why",
    "scale",
    "update",
    "samples",
    "score",
    "doctor",
    "schedule",
    "plan",
    "profile",
    "simulate",
]
GROUPS = {
    "run": "list report compare export replay logs trace dashboard pause resume",
    "fleet": "join tokens place probe drain evict readmit stacks incidents watch selfcheck",
    "ledger": "queues groups versions drops trajectory audit peek requeue dead-letters",
    "config": "check show explain",
    "dev": "check-model pretrain-value",
}
INNER = [[group, name] for group, names in GROUPS.items() for name in names.split()]
BEFORE = {("runs" if inner == ["run", "list"] else inner[1]): inner for inner in INNER if inner[0] != "config"}
COMPLETE = """
import sys
from click.shell_completion import ShellComplete
from pipeline.cli import headrace
shell = ShellComplete(headrace, {}, "headrace", "_HEADRACE_COMPLETE")
print(*(item.value for item in shell.get_completions(sys.argv[1:-1], sys.argv[-1])))
assert not {"pipeline.cli.up", "pipeline.cli.inspect", "pipeline.cli.common"} & set(sys.modules)
"""


def call(*words: str) -> Result:
    return CliRunner().invoke(headrace, words)


@pytest.mark.parametrize("words", [*([name] for name in DAILY), *INNER], ids=" ".join)
def test_a_command_is_reached_by_its_words(words: list[str]) -> None:
    done = call(*words, "--help")
    assert done.exit_code == 0 and done.stderr == ""
    assert done.output.startswith(f"Usage: headrace {' '.join(words)} ")


@pytest.mark.parametrize("old", BEFORE)
def test_a_command_is_reached_by_its_old_name_and_one_line_tells_the_new_one(old: str) -> None:
    now, before = call(*BEFORE[old], "--help"), call(old, "--help")
    assert (before.exit_code, before.stdout) == (now.exit_code, now.stdout)
    assert before.stderr == f"`headrace {old}` is now `headrace {' '.join(BEFORE[old])}`\n"


def test_no_other_name_is_an_old_one() -> None:
    assert {old: words.split() for old, words in RENAMED.items()} == BEFORE


@pytest.mark.parametrize("words", [["runs"], ["trace", "t.0.0", "--run"], ["tokens", "list"], ["watch", "x", "--from"]])
def test_an_old_name_takes_the_same_options_and_ends_with_the_same_code(words: list[str], tmp_path: Path) -> None:
    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "pipeline.cli", *words, str(tmp_path), "--json"]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "config.toml").write_text('[algorithm]\nname = "dapo"\n')
    now, before = run(*BEFORE[words[0]], *words[1:]), run(*words)
    assert (before.returncode, before.stdout) == (now.returncode, now.stdout)
    assert before.stderr.partition("\n")[2] == now.stderr
    assert words != ["runs"] or [row["run"] for row in json.loads(before.stdout)] == [str(tmp_path / "one")]


def test_help_shows_daily_commands_then_groups_then_examples() -> None:
    text = call("--help").output
    parts = [text.index(f"\n{title}") for title in ("Commands:", "Groups", "  Examples:")]
    assert parts == sorted(parts)
    listed = [line.split()[0] for line in text[parts[0] : parts[2]].splitlines() if line.startswith("  ")]
    assert listed == [*DAILY, *GROUPS]


@pytest.mark.parametrize("group", GROUPS)
def test_help_of_a_group_lists_its_commands_and_so_does_the_group_alone(group: str) -> None:
    text = call(group, "--help").output
    commands = text.partition("\nCommands:\n")[2].partition("\n\n")[0]
    assert sorted(line.split()[0] for line in commands.splitlines() if line[2] != " ") == sorted(GROUPS[group].split())
    alone = call(group)
    assert alone.exit_code == 2 and alone.output.rstrip() == text.rstrip()


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["le"], ["ledger"]),
        (["q"], []),
        (["ledger", "d"], ["drops", "dead-letters"]),
        (["fleet", "tokens", "r"], ["revoke", "rotate"]),
        (["ledger", "queues", "--w"], ["--watch"]),
        (["queues", "--w"], ["--watch"]),
        (["no-such-command", "--v"], ["--version"]),
    ],
)
def test_a_shell_completes_names_and_options_and_no_old_name(
    words: list[str], found: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    shell = click.shell_completion.ShellComplete(headrace, {}, "headrace", "_HEADRACE_COMPLETE")
    assert [item.value for item in shell.get_completions(words[:-1], words[-1])] == found
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("words", [[""], ["ledger", ""]], ids=str)
def test_completion_of_names_imports_no_command(words: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", COMPLETE, *words], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) > 8
