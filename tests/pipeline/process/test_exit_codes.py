"""Claims about the exit codes of processes."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.process.exit_codes import (
    MAX_MESSAGE,
    ExitCode,
    FailureKind,
    LastError,
    as_own,
    from_shell,
    kind_of,
    last_error,
    printed_error,
)
from protocol.errors import EngineDied, LedgerUnavailable, ParityFailed, WeightsDamaged, WeightsRejected


@given(st.integers(1, signal.NSIG - 1).filter(lambda number: number != signal.SIGINT))
def test_a_signals_number_survives_a_shell(number: int) -> None:
    assert from_shell(as_own(-number)) == -number
    assert kind_of(from_shell(128 + number)) is FailureKind.INFRASTRUCTURE


@given(st.sampled_from(ExitCode))
def test_a_code_of_headrace_is_the_same_in_a_shell(code: ExitCode) -> None:
    assert from_shell(as_own(code)) == code


def test_errors_are_the_same_when_only_their_numbers_differ():
    one = LastError(
        "RuntimeError", "tensor at 0x7f3a of process 4711,\n  epoch 3: digest 9f8e7d6c5b4a39281706 is not 1.5e-3"
    )
    other = LastError(
        "RuntimeError", "tensor at 0xffff of process 12, epoch 14: digest 00112233445566778899 is not 2.25e-10"
    )
    assert one.identity == other.identity
    assert one.identity != LastError("ValueError", one.message).identity
    assert one.identity != LastError("RuntimeError", "another tensor").identity
    assert LastError("KeyError", "'deadbeef'").identity == "KeyError: 'deadbeef'", "a word is no number"


@pytest.mark.parametrize(
    "error",
    [
        OSError(28, "No space left"),
        MemoryError(),
        TimeoutError(),
        LedgerUnavailable("away"),
        EngineDied("killed"),
        WeightsDamaged("bytes"),
    ],
)
def test_errors_of_the_surroundings_may_pass(error: Exception):
    assert last_error(error).may_pass


@pytest.mark.parametrize(
    "error",
    [
        ValueError("x"),
        ImportError("y"),
        KeyError("z"),
        WeightsRejected("names"),
        ParityFailed("log-probs"),
        RuntimeError(),
    ],
)
def test_errors_of_its_own_do_not(error: Exception):
    assert not last_error(error).may_pass


def test_of_a_group_the_member_that_decides_the_exit_code_is_told():
    told = last_error(ExceptionGroup("tasks", [OSError("disk"), ExceptionGroup("more", [TypeError("no such layer")])]))
    assert (told.type, told.message, told.may_pass) == ("TypeError", "no such layer", False)


def test_a_long_message_is_cut_and_control_characters_do_not_move_the_cursor():
    assert len(last_error(ValueError("x" * 10 * MAX_MESSAGE)).message) == MAX_MESSAGE
    shown = str(LastError("ValueError", "a\x1b[2Jb\nc"))
    assert "\x1b" not in shown
    assert "\n" not in shown


def _printed(code: str) -> LastError | None:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    return printed_error(f"a warning: of something\n{done.stderr}")


def test_the_error_of_a_printed_traceback_is_read_and_other_output_is_none():
    missing = LastError("ModuleNotFoundError", "No module named 'no_such_module_anywhere'")
    assert _printed("import no_such_module_anywhere") == missing
    nested = "try:\n    {}['a']\nexcept KeyError as error:\n    raise ValueError(12) from error"
    assert _printed(nested) == LastError("ValueError", "12")
    assert _printed("raise MemoryError") == LastError("MemoryError", "", may_pass=True)
    assert printed_error("ValueError: said a library") is None
    assert printed_error("Traceback (most recent call last):\n  File x\n") is None
