"""Claims about how benchmarks and drills end."""

from __future__ import annotations

import pytest

from ops.ending import exit_code
from protocol.errors import ConfigError


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
