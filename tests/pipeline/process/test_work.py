"""Claims about how long work is counted from inside."""

from __future__ import annotations

import threading

import pytest

from pipeline.process import work
from pipeline.process.work import LEAST_S, Meter, piece_limit_s


class Clock:
    """Monotonic time, set by hand."""

    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def meter(clock: Clock) -> Meter:
    return Meter(clock)


def test_a_piece_may_take_a_minute_or_five_times_the_slowest_within_a_persons_limit() -> None:
    assert piece_limit_s(0.0, None) == LEAST_S == 60.0
    assert piece_limit_s(11.0, None) == LEAST_S
    assert piece_limit_s(50.0, None) == 250.0
    assert piece_limit_s(50.0, 90.0) == 90.0
    assert piece_limit_s(0.0, 2.0) == 2.0


def test_parts_of_parts_add_up_to_the_whole(meter: Meter) -> None:
    with meter.task("update", 1000.0, "tokens"):
        with meter.part(0.5):
            with meter.part(0.5):
                meter.step(0.5)
                assert meter.report().share == pytest.approx(0.125)
            assert meter.report().share == pytest.approx(0.25), "what a part did not tell of is done at its end"
        assert meter.report().share == pytest.approx(0.5)
        for _ in range(20):
            meter.step(0.1)
        assert meter.report().share == pytest.approx(1.0), "never more than the whole"
    assert meter.report().kind == ""


def test_a_task_tells_its_rate_and_how_long_the_rest_takes(meter: Meter, clock: Clock) -> None:
    with meter.task("update", 1000.0, "tokens"):
        assert meter.report().remaining_s is None
        clock.now_s += 30.0
        meter.step(0.25)
        report = meter.report()
    assert (report.per_s, report.remaining_s) == (pytest.approx(1000 * 0.25 / 30), pytest.approx(90.0))


def test_the_slowest_piece_is_that_of_its_kind_and_idle_time_is_no_piece(meter: Meter, clock: Clock) -> None:
    with meter.task("update"):
        clock.now_s += 7.0
        meter.step()
    # idle
    clock.now_s += 1000.0
    with meter.task("scoring"):
        clock.now_s += 2.0
        meter.step()
        assert meter.report().slowest_s == 2.0
    clock.now_s += 1000.0
    meter.begin()
    clock.now_s += 1.0
    meter.step()
    assert meter.report().slowest_s == 1.0
    with meter.task("update"):
        assert meter.report().slowest_s == 7.0
    assert meter.report().steps == 3


def test_a_task_within_a_task_counts_pieces_and_takes_no_share(meter: Meter) -> None:
    with meter.task("update"), meter.part(0.5):
        with meter.task("prefill"):
            meter.step(1.0)
        report = meter.report()
        assert (report.kind, report.share, report.steps) == ("update", 0.0, 1)


def test_engines_tell_the_meter_of_their_thread_and_no_other(meter: Meter) -> None:
    other = Meter()

    def elsewhere() -> None:
        with work.listening(other):
            work.step()

    with work.listening(meter), work.task("update"), work.part(1.0):
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        work.step(0.5)
        assert meter.report().share == 0.5
    # no meter listens
    work.step()
    assert (meter.report().steps, other.report().steps) == (1, 1)
