"""Claims about how benchmarks and drills end."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec

import pytest

from ops.bench.__main__ import NAMES
from ops.ending import exit_code
from protocol.errors import ConfigError


def test_an_error_of_headrace_is_one_line_with_its_exit_code_and_no_traceback(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def main() -> int:
        raise ConfigError("--mean is 0; expected a number above 0\x1b[2J")

    assert exit_code(main) == 2
    assert capsys.readouterr().err == "headrace: --mean is 0; expected a number above 0\\x1b[2J\n"


def test_the_list_of_benchmarks_names_modules_that_are_there() -> None:
    done = subprocess.run([sys.executable, "-m", "ops.bench"], capture_output=True, text=True, timeout=60, check=True)
    assert [line.split()[0] for line in done.stdout.splitlines()] == list(NAMES)
    assert [name for name in NAMES if find_spec(f"ops.bench.{name}") is None] == []
