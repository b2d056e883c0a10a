"""A loan of a live state: its owner waits for the copy's end, which always comes, or is missed."""

from __future__ import annotations

import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest

from pipeline.process import work
from pipeline.process.work import Meter, listening
from pipeline.training.live_states import StateLoan
from protocol.errors import EngineDied
from tests.manual_clock import ManualClock


class Turns:
    """The end of a copy that comes after so many seconds, as its waiting owner sees it."""

    def __init__(self, loan: StateLoan, clock: ManualClock, *, length_s: int, is_moving: bool) -> None:
        self._loan, self._clock, self._left_s, self._is_moving = loan, clock, length_s, is_moving

    def is_set(self) -> bool:
        return self._left_s == 0

    def wait(self, timeout_s: float) -> bool:
        del timeout_s
        self._clock._now += 1.0
        self._left_s -= 1
        if self._is_moving:
            self._loan._meter.step()
        return self.is_set()


def test_an_owner_waits_until_the_copy_has_ended() -> None:
    copied: list[bool] = []
    loan = StateLoan(lambda: copied.append(loan.is_over))
    with ThreadPoolExecutor(1) as owner:
        waiting = owner.submit(loan.wait)
        assert not waiting.done()
        loan.copy()
        waiting.result(timeout=10)
    assert copied == [False] and loan.is_over


def test_a_copy_that_fails_ends_its_loan_and_tells_the_copier_why() -> None:
    def copy() -> None:
        raise OSError(5, "Input/output error")

    loan = StateLoan(copy)
    with pytest.raises(OSError, match="Input/output"):
        loan.copy()
    assert loan.is_over
    loan.wait()


@pytest.mark.parametrize(("length_s", "is_moving"), [(100, True), (60, False), (61, False)])
def test_a_copy_may_take_long_and_one_that_stands_still_for_a_minute_is_an_error(
    length_s: int, is_moving: bool
) -> None:
    clock = ManualClock()
    loan = StateLoan(lambda: None, clock.monotonic)
    loan._ended = cast("Any", Turns(loan, clock, length_s=length_s + 1, is_moving=is_moving))
    if is_moving or length_s == 60:
        loan.wait()
        assert loan.waited_s == length_s + 1
    else:
        with pytest.raises(EngineDied, match="made no progress for 60 s"):
            loan.wait()


def test_each_piece_of_a_copy_moves_its_loan_and_no_other_work() -> None:
    loan, elsewhere = StateLoan(work.step), Meter()
    with listening(elsewhere):
        loan.copy()
    assert (loan._meter.report().steps, elsewhere.report().steps) == (1, 0)


def test_a_loan_keeps_no_pages_once_it_is_over() -> None:
    class Pages:
        pass

    pages = Pages()
    held = weakref.ref(pages)
    loan = StateLoan(lambda pages=pages: None)
    loan.copy()
    del pages
    assert held() is None
