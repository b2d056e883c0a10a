"""Lanes and main loops: no two slices of a track overlap, and nothing that is known is lost."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from pipeline.observability.timeline.drawing import LATE_US, MAX_LANES, Interval, Lanes, WaitTrack

S = 1_000_000


@given(st.lists(st.tuples(st.integers(0, 100), st.integers(1, 30)), max_size=60))
def test_stretches_of_one_lane_never_overlap_and_few_lanes_are_used(found: list[tuple[int, int]]) -> None:
    lanes, used = Lanes(), dict[int, list[tuple[int, int]]]()
    spans = sorted(((begin, begin + length) for begin, length in found), key=lambda span: span[1])
    for begin, end in spans:
        lane = lanes.take(begin, end)
        assert lane is not None
        used.setdefault(lane, []).append((begin, end))
    for mine in used.values():
        assert all(before[1] <= after[0] for before, after in pairwise(mine))
    at_once = max((sum(begin <= at < end for begin, end in spans) for at in range(131)), default=0)
    assert at_once <= len(lanes) == len(used)


def test_without_a_lane_left_a_stretch_has_none() -> None:
    lanes = Lanes()
    assert [lanes.take(0, 10) for _ in range(MAX_LANES)] == list(range(MAX_LANES))
    assert lanes.take(0, 10) is None
    assert lanes.take(10, 20) == 0


@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(1, 40), st.sampled_from("ab")), max_size=40),
    st.lists(st.tuples(st.integers(0, 900), st.sampled_from("ab")), max_size=40),
)
def test_a_main_loop_has_one_word_at_each_moment_in_order(
    waits: list[tuple[int, int, str]], looks: list[tuple[int, str]]
) -> None:
    track, at, drawn = WaitTrack(), 0, list[Interval]()
    known = list[Interval]()
    for gap, length, word in waits:
        known.append(Interval((at + gap) * S // 10, (at + gap + length) * S // 10, word))
        at += gap + length
    for at_ds, word in sorted(looks):
        track.look(at_ds * S // 10, word)
    for one in known:
        track.wait(*one)
        drawn += track.until(one.end_us)
    drawn += track.rest()
    assert all(before.end_us <= after.begin_us for before, after in pairwise(drawn))
    assert all(one.begin_us < one.end_us for one in drawn)
    for one in known:
        middle = (one.begin_us + one.end_us) // 2
        assert [each.word for each in drawn if each.begin_us <= middle < each.end_us] == [one.word]


def test_a_look_holds_until_the_next_and_for_seconds_at_most_where_no_wait_is_known() -> None:
    track = WaitTrack()
    for second in (0, 1, 2, 10, 11):
        track.look(second * S, "input")
    track.look(12 * S, "compute")
    track.wait(10 * S + S // 2, 11 * S, "room")
    assert list(track.rest()) == [
        (0, 5 * S, "input"), (10 * S, 10 * S + S // 2, "input"), (10 * S + S // 2, 11 * S, "room"),
        (11 * S, 12 * S, "input"), (12 * S, 15 * S, "compute"),
    ]  # fmt: skip


def test_looks_are_held_back_until_no_wait_can_come_before_them() -> None:
    track = WaitTrack()
    for second in range(60):
        track.look(second * S, "input")
    assert list(track.until(30 * S)) == []
    track.wait(5 * S, 20 * S, "room")
    drawn = list(track.until(59 * S)) + list(track.rest())
    assert drawn == [(0, 5 * S, "input"), (5 * S, 20 * S, "room"), (20 * S, 62 * S, "input")]
    assert LATE_US > 30 * S, "waits are written after 30 s at the latest"
