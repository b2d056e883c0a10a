"""Claims about the exit codes of processes."""

from __future__ import annotations

import signal

from hypothesis import given
from hypothesis import strategies as st

from pipeline.process.exit_codes import ExitCode, FailureKind, as_own, from_shell, kind_of


@given(st.integers(1, signal.NSIG - 1).filter(lambda number: number != signal.SIGINT))
def test_a_signals_number_survives_a_shell(number: int) -> None:
    assert from_shell(as_own(-number)) == -number
    assert kind_of(from_shell(128 + number)) is FailureKind.INFRASTRUCTURE


@given(st.sampled_from(ExitCode))
def test_a_code_of_headrace_is_the_same_in_a_shell(code: ExitCode) -> None:
    assert from_shell(as_own(code)) == code
