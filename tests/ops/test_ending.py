"""Claims about how benchmarks and drills end."""

from __future__ import annotations

from pathlib import Path

import pytest

import ops.ending
from ops.ending import exit_code
from pipeline.cli.bench import NAMES
from protocol.errors import ConfigError

OPS = Path(ops.ending.__file__).parent


def test_an_error_of_headrace_is_one_line_with_its_exit_code_and_no_traceback(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def main() -> int:
        raise ConfigError("--mean is 0; expected a number above 0\x1b[2J")

    assert exit_code(main) == 2
    assert capsys.readouterr().err == "headrace: --mean is 0; expected a number above 0\\x1b[2J\n"


@pytest.mark.parametrize(("returned", "code"), [(0, 0), (1, 1), (None, 0)])
def test_a_commands_own_exit_code_is_kept(returned: int | None, code: int) -> None:
    assert exit_code(lambda: returned) == code


def test_a_defect_is_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        exit_code(lambda: 1 // 0)


@pytest.mark.parametrize("module", [*(f"bench/{name}" for name in NAMES), "drill", "drill/soak", "soak"])
def test_each_benchmark_and_drill_ends_that_way(module: str) -> None:
    files = [path for path in (OPS / f"{module}.py", OPS / module / "__main__.py") if path.exists()]
    [end] = [file.read_text(encoding="utf-8").rpartition('if __name__ == "__main__":\n')[2].strip() for file in files]
    assert end == "sys.exit(exit_code(main))"
