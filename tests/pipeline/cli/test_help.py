"""Claims about the command line itself: light, with examples, and stern with typing errors."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from click.testing import CliRunner

from pipeline.cli import headrace

COMMANDS = [
    [],
    *([name] for name in ("up", "down", "scale", "status", "why", "queues", "audit", "peek", "requeue")),
    *([name] for name in ("score", "report", "samples", "dead-letters")),
    *(["dead-letters", name] for name in ("list", "show", "retry")),
    ["config"],
    ["config", "check"],
    ["config", "show"],
    ["config", "explain"],
]
HEAVY = {"torch", "transformers", "vllm", "matplotlib", "math_verify", "pyarrow"}
_PROBE = """
import json, sys
from pipeline.cli import main
try:
    main(json.loads(sys.argv[1]))
except SystemExit as ending:
    code = ending.code
print("\\n@" + json.dumps([code, sorted(sys.modules)]))
"""


@pytest.mark.parametrize("command", COMMANDS, ids=lambda words: " ".join(words) or "headrace")
def test_help_has_runnable_examples(command: list[str]) -> None:
    done = CliRunner().invoke(headrace, [*command, "--help"])
    assert done.exit_code == 0
    if command not in (["config"], ["dead-letters"]):
        assert "Example" in done.output
        assert f"headrace {' '.join(command)}".strip() in done.output


@pytest.mark.parametrize("command", [[], ["up"], ["status"], ["score"], ["config", "check"]], ids=str)
def test_help_imports_nothing_heavy(command: list[str]) -> None:
    words = json.dumps([*command, "--help"])
    done = subprocess.run([sys.executable, "-c", _PROBE, words], capture_output=True, text=True, timeout=60, check=True)
    code, modules = json.loads(done.stdout.rpartition("\n@")[2])
    assert code == 0
    assert HEAVY.isdisjoint(modules)
    assert not {"redis", "zmq", "pydantic", "rich"} & set(modules), "a --help needs click alone"


def _main(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pipeline.cli", *words], capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["stauts"], "did you mean 'status'?"),
        (["up"], "give a run file"),
        (["status", "/no/such/run"], "is not a run"),
        (["scale", "generator=0"], "expected ROLE=NUMBER"),
        (["scale", "learner=2"], "expected ROLE=NUMBER"),
        (["up", "/no/such.toml"], "no such file"),
        (["up", "--resume", "/no/such/run"], "is not a run"),
        (["requeue"], "one of the three"),
        (["requeue", "81"], "expected LANE.GROUP.MEMBER"),
        (["requeue", "--field", "rewards"], "expected reward, reference, value"),
        (["dead-letters", "retry"], "or --all"),
    ],
)
def test_a_wrong_command_is_one_sentence_and_exit_code_2(words: list[str], message: str) -> None:
    done = _main(*words)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
