"""Two-phase stop as a pure state machine, and the meaning of exit codes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.process.exit_codes import DrainTimeout, ExitCode, FailureKind, Interrupted, as_own, exit_code_of, kind_of
from pipeline.runtime.lifecycle import FirstError, Lifecycle, LifecyclePhase
from pipeline.runtime.registry.contract import MAX_DETAIL_CHARS
from protocol.errors import (
    ConfigError,
    DataError,
    Diverged,
    EngineDied,
    Fenced,
    LedgerError,
    LedgerFull,
    LedgerMismatch,
    LedgerUnavailable,
    StorageFailed,
)
from protocol.ids import Incarnation, Role


def test_the_first_signal_drains_until_the_deadline():
    life = Lifecycle(drain_timeout_s=20.0).ready().signal(100.0, "SIGTERM")
    assert life.is_draining
    assert not life.is_immediate
    assert life.reason == "received SIGTERM"
    assert not life.is_overdue(119.9)
    assert life.is_overdue(120.0)


def test_a_drain_goes_on_while_something_is_done_up_to_its_ceiling():
    life = Lifecycle(drain_timeout_s=20.0, drain_ceiling_s=100.0).moved(50.0, 20.0).ready().signal(100.0, "SIGTERM")
    assert life.deadline_s == 120.0, "what was done before says nothing"
    life = life.moved(115.0, 20.0)
    assert not life.is_overdue(134.9)
    assert life.is_overdue(135.0)
    assert life.moved(90.0, 20.0).deadline_s == 135.0, "a deadline never moves back"
    assert life.moved(130.0, 600.0).deadline_s == 200.0, "the ceiling"


def test_the_second_signal_is_immediate_and_moves_no_deadline():
    life = Lifecycle(drain_timeout_s=20.0).ready().signal(100.0, "SIGINT").signal(110.0, "SIGTERM")
    assert life.is_immediate
    assert life.deadline_s == 120.0
    assert life.reason == "received SIGINT"


def test_a_signal_after_the_run_ended_is_still_the_first_signal():
    life = Lifecycle(drain_timeout_s=20.0).ready().stop(100.0, "the run is finished").signal(101.0, "SIGTERM")
    assert not life.is_immediate
    assert life.signal(102.0, "SIGTERM").is_immediate


def test_the_first_code_that_is_not_ok_stays():
    life = Lifecycle(drain_timeout_s=1.0).ready().stop(0.0, "a").stop(0.1, "b", code=ExitCode.STARVED).stop(0.2, "c")
    assert life.code is ExitCode.STARVED
    assert life.reason == "a"


def test_a_worker_told_to_stop_while_starting_never_runs():
    assert Lifecycle(drain_timeout_s=1.0).signal(0.0, "SIGTERM").ready().phase is LifecyclePhase.DRAINING


@given(st.lists(st.tuples(st.sampled_from(["ready", "stop", "signal", "ended"]), st.floats(0, 10)), max_size=20))
def test_a_life_only_goes_forward(events: list[tuple[str, float]]):
    order = list(LifecyclePhase)
    life, now, deadline = Lifecycle(drain_timeout_s=5.0), 0.0, None
    for event, passed in events:
        now += passed
        before = life
        match event:
            case "ready":
                life = life.ready()
            case "stop":
                life = life.stop(now, "asked")
            case "signal":
                life = life.signal(now, "SIGTERM")
            case _:
                life = life.ended()
        assert order.index(life.phase) >= order.index(before.phase)
        if before.deadline_s is not None:
            assert life.deadline_s == before.deadline_s
        if life.is_draining:
            deadline = deadline or life.deadline_s
            assert deadline is not None
            assert life.is_overdue(deadline)
            assert life.reason
        assert life.is_immediate == (life.num_signals >= 2 and life.phase is not LifecyclePhase.STOPPED)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("x"), ExitCode.CONFIG),
        (DataError("x"), ExitCode.CONFIG),
        (Diverged("x"), ExitCode.BAD_STEPS),
        (ExceptionGroup("g", [Diverged("x"), DrainTimeout("y")]), ExitCode.BAD_STEPS),
        (LedgerMismatch("x"), ExitCode.CONFIG),
        (LedgerUnavailable("x"), ExitCode.LEDGER_UNAVAILABLE),
        (LedgerFull("x"), ExitCode.LEDGER_UNAVAILABLE),
        (Fenced("x"), ExitCode.FENCED),
        (Interrupted("x"), ExitCode.INTERRUPTED),
        (KeyboardInterrupt(), ExitCode.INTERRUPTED),
        (DrainTimeout("x"), ExitCode.DRAIN_TIMEOUT),
        (LedgerError("x"), ExitCode.LEDGER_UNAVAILABLE),
        (StorageFailed("x"), ExitCode.HOST_FAILED),
        (MemoryError("x"), ExitCode.HOST_FAILED),
        (TimeoutError("x"), ExitCode.FAILURE),
        (ZeroDivisionError("x"), ExitCode.FAILURE),
        (ExceptionGroup("g", [DrainTimeout("x")]), ExitCode.DRAIN_TIMEOUT),
        (ExceptionGroup("g", [ZeroDivisionError(), Fenced("x")]), ExitCode.FENCED),
        (ExceptionGroup("g", [DrainTimeout("x"), ZeroDivisionError()]), ExitCode.FAILURE),
        (ExceptionGroup("g", [LedgerFull("x"), ExceptionGroup("h", [ConfigError("y")])]), ExitCode.CONFIG),
    ],
)
def test_every_ending_has_its_exit_code(error: BaseException, code: ExitCode):
    assert exit_code_of(error) is code


def test_exit_codes_are_the_documented_numbers():
    assert {code.name: int(code) for code in ExitCode} == {
        "OK": 0, "FAILURE": 1, "CONFIG": 2, "LEDGER_UNAVAILABLE": 3, "FENCED": 4, "DRAIN_TIMEOUT": 5, "STARVED": 6,
        "BAD_STEPS": 7, "STUCK": 8, "HOST_FAILED": 9, "ENGINE": 10, "NOT_ALL_JUDGED": 11,
        "INTERRUPTED": 130,
    }  # fmt: skip
    assert ExitCode.CONFIG.is_hopeless
    assert not ExitCode.FAILURE.is_hopeless


@pytest.mark.parametrize("code", [-9, -15, -11, 0, 3, 4, 5, 8, 9, 130])
def test_what_surrounds_a_worker_is_no_failure_of_its_data(code: int):
    assert kind_of(code) is FailureKind.INFRASTRUCTURE


@pytest.mark.parametrize("code", [1, 42])
def test_an_error_of_its_own_or_an_unknown_code_is_a_failure_of_its_data(code: int):
    assert kind_of(code) is FailureKind.DATA


def test_a_death_by_signal_becomes_an_exit_code_as_in_shells():
    assert (as_own(-9), as_own(3), as_own(0)) == (137, 3, 0)


WHO = Incarnation(Role.GENERATOR, "generator-0", 3)


def ended_by(*errors: Exception) -> FirstError:
    first = FirstError()
    for error in errors:
        with pytest.raises(type(error)), first.recording():
            raise error
    return first


async def test_the_first_error_is_said_by_its_class_and_in_its_words() -> None:
    async def fails() -> None:
        raise EngineDied("vLLM's processes\nfailed")

    first = FirstError()
    with pytest.raises(EngineDied):
        await first.record_from(fails())
    with pytest.raises(KeyError), first.recording():
        raise KeyError("a later one")
    said = first.report(WHO)
    assert said is not None and (said.who, said.error, said.message) == (WHO, "EngineDied", "vLLM's processes failed")


@pytest.mark.parametrize("error", [Fenced("newer"), LedgerUnavailable("away"), Interrupted("twice")])
def test_an_end_that_others_brought_about_is_not_said(error: Exception) -> None:
    assert ended_by(error).report(WHO) is None
    assert FirstError().report(WHO) is None


def test_a_message_that_would_steer_a_terminal_is_made_printable() -> None:
    said = ended_by(ValueError("bad \x1b[2Jverdict")).report(WHO)
    assert said is not None and "\x1b" not in said.message and "verdict" in said.message


def test_a_long_message_and_a_group_of_errors_fit_into_a_report() -> None:
    said = ended_by(ExceptionGroup("several", [ValueError("x" * 5000)])).report(WHO)
    assert said is not None and (said.error, len(said.message)) == ("ValueError", MAX_DETAIL_CHARS)
