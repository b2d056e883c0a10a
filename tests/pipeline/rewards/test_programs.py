"""Programs in responses: right when they pass their tests, wrong when they hang, grow or leave."""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from pipeline.rewards.pool import VerifierPool
from pipeline.rewards.programs import verify, verify_share
from pipeline.rewards.registry import resolve_named
from pipeline.rewards.verifier import Response, Verdict, VerifierFailure, VerifierFailureKind, VerifierOutcome
from protocol.errors import ConfigError
from tests.pipeline.rewards.test_pool import Limits, until_gone

CODE = frozenset({"code"})
ADD = "def add(a, b):\n    return a + b\n"
ECHO = "print(int(input()) * 2)\n"
PAIRS = {"inputs": ["2", "5\n"], "outputs": ["4", "10\n"]}


def block(program: str, tests: Any = None, answer: str = "", **extra: Any) -> Response:
    told = extra if tests is None else {"tests": tests, **extra}
    text = f"Here it is:\n```python\n{program}\n```\nDone."
    return Response(response_text=text, answer=answer, verifier="code", extra=told)


def accuracy(outcome: VerifierOutcome) -> float:
    assert isinstance(outcome, Verdict), outcome
    return outcome.accuracy


@pytest.mark.parametrize(
    ("program", "tests", "right", "share"),
    [
        (ADD, ["assert add(2, 3) == 5", "assert add(-1, 1) == 0"], 1.0, 1.0),
        (ADD, ["assert add(2, 3) == 5", "assert add(2, 2) == 5"], 0.0, 0.5),
        (ADD, json.dumps(["assert add(2, 3) == 5"]), 1.0, 1.0),
        (ECHO, PAIRS, 1.0, 1.0),
        (ECHO, {"inputs": ["2", "5"], "outputs": ["4", "11"]}, 0.0, 0.5),
        (ADD, {"fn_name": "add", "inputs": [[1, 2], [3, 4]], "outputs": [3, [7]]}, 1.0, 1.0),
        ("class Solution:\n    def twice(self, n):\n        return (n, n)", {"fn_name": "twice", "inputs": [[1]],
         "outputs": [[1, 1]]}, 1.0, 1.0),
        ("import sys; sys.exit(0)", ["assert True"], 0.0, 0.0),
        ("import os; os._exit(0)", ["assert True"], 0.0, 0.0),
        ("def add(a, b): raise SystemExit", ["add(1, 2)", "assert True"], 0.0, 0.5),
        ("syntax error here", ["assert True"], 0.0, 0.0),
        ("print(4); raise SystemExit(1)", {"inputs": [""], "outputs": ["4"]}, 0.0, 0.0),
    ],
)  # fmt: skip
def test_a_program_is_right_when_it_passes_all_tests(program: str, tests: Any, right: float, share: float) -> None:
    assert accuracy(verify([block(program, tests)])[0]) == right
    assert accuracy(verify_share([block(program, tests)])[0]) == share


def test_the_last_block_of_python_counts_and_a_response_without_one_is_wrong() -> None:
    text = f"```python\nbroken(\n```\nNo:\n```py\n{ADD}```\nRun it:\n```bash\npython add.py\n```"
    tests = {"tests": ["assert add(1, 1) == 2"]}
    good = Response(response_text=text, answer="", verifier="code", extra=tests)
    none = Response(response_text=ADD, answer="", verifier="code", extra=tests)
    assert [accuracy(outcome) for outcome in verify([good, none])] == [1.0, 0.0]


def test_a_text_of_tests_may_define_a_check_of_the_entry_point() -> None:
    check = "def check(candidate):\n    assert candidate(2, 3) == {}"
    outcomes = verify([block(ADD, check.format(5), entry_point="add"), block(ADD, check.format(6), entry_point="add")])
    assert [accuracy(outcome) for outcome in outcomes] == [1.0, 0.0]


@pytest.mark.parametrize("tests", [[], {}, {"inputs": ["1"], "outputs": []}, [1], "", {"inputs": "1", "outputs": "1"}])
def test_tests_that_are_none_are_a_failure_of_the_data_and_never_wrong(tests: Any) -> None:
    (outcome,) = verify([block(ADD, tests)])
    assert isinstance(outcome, VerifierFailure)
    assert outcome.kind is VerifierFailureKind.BAD_ANSWER


async def judged(*responses: Response, timeout_s: float = 2.0) -> list[VerifierOutcome]:
    async with VerifierPool(Limits(timeout_s=timeout_s), configured=CODE) as pool:
        await pool.start(["code"])
        return await pool.score(responses)


async def test_a_program_that_hangs_is_wrong_in_time_and_its_sandbox_goes_on() -> None:
    async with VerifierPool(Limits(timeout_s=2.0, wait_s=60.0), configured=CODE) as pool:
        await pool.start(["code"])
        (before,) = pool.pids
        started = time.monotonic()
        outcomes = await pool.score([block("while True: pass", ["assert True"]), block(ADD, ["assert add(1, 1) == 2"])])
        assert time.monotonic() - started < 50.0
        assert [accuracy(outcome) for outcome in outcomes] == [0.0, 1.0]
        assert isinstance(outcomes[0], Verdict)
        assert outcomes[0].judged and "did not end within 1.5 s" in outcomes[0].reason
        assert pool.pids == [before]


async def test_what_a_program_started_is_killed_with_it(tmp_path: Path) -> None:
    tell = tmp_path / "pid"
    leaves = (
        "import subprocess, pathlib\n"
        "one = subprocess.Popen(['sleep', '300'], start_new_session=True)\n"
        f"pathlib.Path({str(tell)!r}).write_text(str(one.pid))\n"
    )
    async with VerifierPool(Limits(timeout_s=5.0), configured=CODE) as pool:
        (outcome,) = await pool.score([block(leaves, ["assert True"])])
        assert accuracy(outcome) == 1.0
        await until_gone([int(tell.read_text())])


async def test_a_program_that_forks_without_end_is_wrong_and_spoils_no_other() -> None:
    forks = "import os, time\nfor _ in range(80):\n    if os.fork() == 0:\n        time.sleep(300)\ntime.sleep(300)"
    forked, fine = await judged(block(forks, ["assert True"]), block(ADD, ["assert add(1, 1) == 2"]), timeout_s=20.0)
    assert isinstance(forked, Verdict)
    assert (forked.accuracy, forked.judged) == (0.0, False)
    assert "processes" in forked.reason
    assert accuracy(fine) == 1.0


async def test_a_program_has_limits_of_memory_and_files_and_sees_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "a-key")
    grows = "x = bytearray(3 << 29)"
    writes = "open('big', 'wb').truncate(17 << 20)"
    looks = "import os\nkeys = [v for v in os.environ.values() if 'a-key' in v]"
    outcomes = await judged(
        block(grows, ["assert x"]), block(writes, ["assert True"]), block(looks, ["assert keys == []"]), timeout_s=10.0
    )
    assert [accuracy(outcome) for outcome in outcomes] == [0.0, 0.0, 1.0]


async def test_data_alone_never_has_its_tests_run_as_code(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    async with VerifierPool(Limits(), configured=frozenset({"arithmetic"})) as pool:
        (outcome,) = await pool.score([block("", [f"open({str(ran)!r}, 'w').close()"])])
    assert isinstance(outcome, VerifierFailure)
    assert "a data line may not choose it" in outcome.error
    assert not ran.exists()
    with pytest.raises(
        ConfigError, match="'reasoning-gym' runs texts of the data as code, so a data line may not choose"
    ):
        resolve_named("reasoning-gym", frozenset({"arithmetic"}))


DAEMON = (
    "import os, sys, time\n"
    "read, write = os.pipe()\n"
    "if os.fork() == 0:\n"
    "    os.setsid()\n"
    "    if os.fork():\n"
    "        os._exit(0)\n"
    "    os.write(write, str(os.getpid()).encode())\n"
    "    os.execve(sys.executable, ['x', '-c', 'import time; time.sleep(300)'], {{}})\n"
    "open({tell!r}, 'w').write(os.read(read, 20).decode())\n"
)


async def test_a_daemon_without_the_environment_of_its_program_is_killed_with_it(tmp_path: Path) -> None:
    tell = tmp_path / "pid"
    async with VerifierPool(Limits(timeout_s=5.0), configured=CODE) as pool:
        (outcome,) = await pool.score([block(DAEMON.format(tell=str(tell)), ["assert True"])])
        assert accuracy(outcome) == 1.0
        await until_gone([int(tell.read_text())])


async def test_such_a_daemon_is_killed_with_a_sandbox_that_is_ended_during_the_program(tmp_path: Path) -> None:
    tell = tmp_path / "pid"
    forks = "for _ in range(80):\n    if os.fork() == 0:\n        time.sleep(300)\ntime.sleep(300)"
    (outcome,) = await judged(block(DAEMON.format(tell=str(tell)) + forks, ["assert True"]), timeout_s=20.0)
    assert isinstance(outcome, Verdict) and "processes" in outcome.reason
    await until_gone([int(tell.read_text())])


@pytest.mark.parametrize(
    "writes",
    [
        "for n in range(8):\n    open(f'{n}', 'wb').write(bytes(12 << 20))",
        "for n in range(1500):\n    open(f'{n}', 'wb')",
        "import os\nfor n in range(1500):\n    os.mkdir('a')\n    os.chdir('a')",
    ],
)
def test_all_files_of_a_program_together_are_limited_and_its_folder_goes(
    writes: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (outcome,) = verify([block(writes, ["assert True"])])
    assert isinstance(outcome, Verdict)
    assert outcome.accuracy == 0.0 and "wrote more than" in outcome.reason
    assert list(tmp_path.iterdir()) == []
