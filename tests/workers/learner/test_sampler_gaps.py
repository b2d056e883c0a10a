"""A generator's gap to the learner's log-probs is compared with its peers' at the same lag."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from workers.learner.sampler_gaps import FEWEST_CHUNKS, LAST_CHUNKS, GeneratorGap, SamplerGaps

HONEST = 0.02
"""Gap of a healthy engine at equal weights, in nats."""
MOVED = 0.05
"""Growth of the gap by one update."""


def noted(
    number: int, gap_of: Callable[[int, int], float], *, generators: int = 3, lag_of: Callable[[int], int] = lambda n: 0
) -> SamplerGaps:
    """So many chunks of each generator; ``gap_of(generator, lag)`` in nats."""
    gaps, rng = SamplerGaps(), np.random.default_rng(0)
    for turn in range(number):
        for one in range(generators):
            lag = lag_of(one)
            tokens = rng.exponential(gap_of(one, lag), 32).astype(np.float32)
            gaps.note(f"generator-{one}#{1 + turn // 1000}", tokens, np.full(32, lag))
    return gaps


def by_name(gaps: SamplerGaps) -> dict[str, GeneratorGap]:
    return {one.worker: one for one in gaps.worst(100)}


def test_a_generator_with_other_tokens_stands_out_and_its_peers_do_not() -> None:
    for generators in (2, 3, 8):
        found = by_name(noted(12, lambda one, _: 6.0 if one == 1 else HONEST, generators=generators))
        assert found["generator-1"].excess > 2.0 and found["generator-1"].usual < 0.1
        assert all(one.excess < 0.1 for name, one in found.items() if name != "generator-1")


def test_staleness_alone_makes_no_excess_when_peers_are_as_stale() -> None:
    stale = noted(12, lambda _, lag: HONEST + MOVED * lag, lag_of=lambda one: 6)
    assert all(one.gap > 0.25 and abs(one.excess) < 0.1 for one in by_name(stale).values())


def test_tokens_at_a_lag_that_no_peer_has_are_not_judged() -> None:
    behind = noted(12, lambda _, lag: HONEST + MOVED * lag, lag_of=lambda one: 40 if one == 2 else 0)
    assert set(by_name(behind)) == {"generator-0", "generator-1"}
    assert all(abs(one.excess) < 0.1 for one in by_name(behind).values())


def test_a_chunk_across_versions_is_compared_at_each_of_its_lags() -> None:
    gaps = SamplerGaps()
    lags = np.repeat([0, 3], 16)
    for _ in range(10):
        for one in range(3):
            gaps.note(f"generator-{one}#1", np.where(lags == 0, 0.01, 0.5).astype(np.float32), lags)
    (one, *_) = gaps.worst(1)
    assert one.gap == pytest.approx(0.255) and one.usual == pytest.approx(0.255)


def test_a_lone_generator_is_compared_with_its_own_past() -> None:
    gaps = noted(30, lambda _, __: HONEST, generators=1)
    assert abs(by_name(gaps)["generator-0"].excess) < 0.05
    for _ in range(FEWEST_CHUNKS):
        gaps.note("generator-0#1", np.full(32, 6.0, np.float32), np.zeros(32, int))
    assert by_name(gaps)["generator-0"].excess > 0.8


def test_a_successor_begins_anew_and_few_chunks_are_no_report() -> None:
    gaps = noted(12, lambda one, _: 6.0 if one == 1 else HONEST)
    gaps.note("generator-1#2", np.full(32, HONEST, np.float32), np.zeros(32, int))
    assert "generator-1" not in by_name(gaps)
    for _ in range(FEWEST_CHUNKS):
        gaps.note("generator-1#2", np.full(32, HONEST, np.float32), np.zeros(32, int))
    assert by_name(gaps)["generator-1"].excess < 0.1


def test_few_tokens_are_no_report_however_many_chunks_they_are_in() -> None:
    gaps = SamplerGaps()
    for turn in range(LAST_CHUNKS):
        for one in range(3):
            gaps.note(f"generator-{one}#1", np.full(2, 3.0, np.float32), np.zeros(2, int))
        assert gaps.worst(9) == [], f"{2 * turn + 2} tokens"


def test_single_tokens_that_became_very_unlikely_are_no_great_gap() -> None:
    gaps = SamplerGaps()
    for turn in range(12):
        for one in range(3):
            tokens = np.full(32, HONEST, np.float32)
            tokens[0] = 40.0 if one == 1 and turn > 3 else HONEST
            gaps.note(f"generator-{one}#1", tokens, np.zeros(32, int))
    assert 0.05 < by_name(gaps)["generator-1"].excess < 0.15


def test_a_generator_that_is_well_again_is_so_after_few_chunks() -> None:
    gaps = noted(12, lambda one, _: 6.0 if one == 1 else HONEST)
    for _ in range(LAST_CHUNKS):
        gaps.note("generator-1#1", np.full(32, HONEST, np.float32), np.zeros(32, int))
    assert by_name(gaps)["generator-1"].excess < 0.1


def test_the_worst_come_first_and_relabelled_generators_change_nothing() -> None:
    gaps = noted(12, lambda one, _: HONEST * (1 + 40 * one), generators=5)
    assert [one.worker for one in gaps.worst(2)] == ["generator-4", "generator-3"]
    turned = noted(12, lambda one, _: HONEST * (1 + 40 * (4 - one)), generators=5)
    assert [one.worker for one in turned.worst(2)] == ["generator-0", "generator-1"]
