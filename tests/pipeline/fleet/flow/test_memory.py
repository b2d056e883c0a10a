"""A link's past is small: a large fleet has thousands of links."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Iterator
from math import nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.fleet.flow.links import CounterPast, LinkTrack, PairTrack
from pipeline.fleet.flow.rows import LinkRow


def rows(number: int) -> Iterator[LinkRow]:
    for at in range(number):
        yield LinkRow(at + 0.25, "generator-0", "reward-0", 3.0 * at, 3.0 * at, 3.0 * at, 3.0 * at, 0.0, nan)


def test_the_past_of_a_link_takes_as_much_memory_after_an_hour_as_after_minutes() -> None:
    track = LinkTrack(LinkRow(0.0, "generator-0", "reward-0", 0, 0, 0, 0), PairTrack(), 0.0)
    # the usual delays belong to all links of two roles
    tracemalloc.start()
    for row in rows(3600):
        track.read(row, row.time_s)
        track.pair = PairTrack()
    gc.collect()
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 11_000
    assert track.rate("sent", 3590.0) == 3.0


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=30), st.integers(-1, 40), st.integers(0, 30), st.integers(0, 30),
    st.sampled_from([0.0, 1e15, 0.1]),
)  # fmt: skip
def test_kept_counters_answer_as_the_rows_themselves_would(
    steps: list[int], level: float, begin: int, length: int, start: float
) -> None:
    counts, level = [start + sum(steps[: at + 1]) for at in range(len(steps))], start + level
    kept = [LinkRow(float(at), "a", "b", count, count, count, count) for at, count in enumerate(counts)]
    past = CounterPast(kept[0])
    for row in kept[1:]:
        past.append(row)
    above = next((at for at, count in enumerate(counts) if count > level), None)
    assert past.since("sent", level) == (None if above is None else float(above))
    inside = [row for row in kept if begin <= row.time_s <= begin + length]
    span_s = inside[-1].time_s - inside[0].time_s if inside else 0.0
    expected = (inside[-1].sent - inside[0].sent) / span_s if span_s else 0.0
    assert past.rate("sent", begin, begin + length) == pytest.approx(expected, abs=1e-6)


def test_counters_are_exact_after_a_jump_and_a_restart() -> None:
    past = CounterPast(LinkRow(0.0, "a", "b", *[1e12] * 5))
    for at in range(1, 700):
        past.append(LinkRow(float(at), "a", "b", *[1e12 + 1e9 + at] * 5))
        if at > 600:
            assert past.since("sent", 1e12 + 1e9 + at - 1) == at
    past.clear()
    for at in range(5):
        past.append(LinkRow(700.0 + at, "a", "b", *[float(at)] * 5))
    assert past.since("sent", 2.0) == 703.0


def test_the_age_of_old_messages_is_known_to_a_few_rows_and_of_the_newest_exactly() -> None:
    past = CounterPast(LinkRow(0.0, "a", "b", 0, 0, 0, 0))
    for at in range(1, 1000):
        past.append(LinkRow(float(at), "a", "b", at, at, at, at))
        for age in (1, 50, 110):
            assert age > at or past.since("sent", at - age) == at - age + 1
        for age in (130, 250, 390):
            assert age > at or abs((past.since("sent", at - age) or 0.0) - (at - age)) <= 9
        assert at < 60 or past.rate("sent", at - 60.0, at) == 1.0
