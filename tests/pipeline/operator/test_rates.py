"""Rates from counters, with a driven time."""

from __future__ import annotations

from pipeline.operator.rates import LedgerCounter, ProcessCount, ProcessCounters, Rate


def test_a_rate_is_the_mean_over_the_last_seconds_and_unknown_at_first() -> None:
    rate = Rate(window_s=10.0)
    assert rate.observe(0.0, 100.0) is None
    assert rate.observe(50.0, 105.0) == 10.0
    assert rate.observe(50.0, 110.0) == 5.0
    # A reading older than the window no longer counts.
    assert rate.observe(50.0, 115.0) == 0.0


def test_a_second_reading_at_the_same_moment_is_no_division_by_zero() -> None:
    rate = Rate()
    assert rate.observe(1.0, 5.0) is None
    assert rate.observe(9.0, 5.0) is None
    assert rate.observe(9.0, 6.0) == 8.0


def test_the_sum_of_counters_goes_on_when_a_process_starts_again_at_0() -> None:
    counters = ProcessCounters()
    assert counters.observe({"generator-0": ProcessCount(1, 1000.0), "generator-1": ProcessCount(1, 10.0)}) == 0.0
    assert counters.observe({"generator-0": ProcessCount(1, 1100.0), "generator-1": ProcessCount(1, 10.0)}) == 100.0
    # generator-0 died, and its next incarnation has counted 30.
    assert counters.observe({"generator-0": ProcessCount(2, 30.0), "generator-1": ProcessCount(1, 20.0)}) == 140.0
    assert counters.observe({"generator-0": ProcessCount(2, 31.0), "generator-1": ProcessCount(1, 20.0)}) == 141.0


def test_a_process_that_comes_later_counts_whole_and_one_that_is_away_counts_once() -> None:
    counters = ProcessCounters()
    counters.observe({"a": ProcessCount(1, 5.0)})
    assert counters.observe({"a": ProcessCount(1, 5.0), "b": ProcessCount(1, 7.0)}) == 7.0
    assert counters.observe({"b": ProcessCount(1, 7.0)}) == 7.0
    assert counters.observe({"a": ProcessCount(1, 6.0), "b": ProcessCount(1, 7.0)}) == 8.0


def test_a_sum_that_falls_in_one_incarnation_counts_nothing() -> None:
    counters = ProcessCounters()
    counters.observe({"a": ProcessCount(1, 500.0)})
    assert counters.observe({"a": ProcessCount(1, 300.0)}) == 0.0
    assert counters.observe({"a": ProcessCount(1, 310.0)}) == 10.0


def test_a_ledger_that_lost_its_last_writes_gives_no_rate_below_zero() -> None:
    counter = LedgerCounter()
    assert [counter.observe(value) for value in (100.0, 120.0, 90.0, 95.0)] == [0.0, 20.0, 20.0, 25.0]


def test_counters_of_processes_that_never_come_back_are_forgotten() -> None:
    counters = ProcessCounters()
    for number in range(20_000):
        counters.observe({f"joined-{number}": ProcessCount(1, 1.0)})
    assert len(counters._seen) <= 8192
