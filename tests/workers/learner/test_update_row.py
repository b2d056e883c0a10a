"""The histograms of an update: every number is in one bin, and equal numbers in one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pipeline.observability.history import HISTORY_NAME, Histogram, columns, run_history
from tests.pipeline.observability.rows import update_row
from workers.learner.update_row import histogram


def test_whole_numbers_that_are_close_have_a_bin_each() -> None:
    assert histogram(np.array([3, 3, 5])) == Histogram(3.0, 6.0, (2, 0, 1))


@pytest.mark.parametrize("spread", [21, 39, 40, 41, 1000])
def test_bins_of_whole_numbers_hold_as_many_of_them_each(spread: int) -> None:
    found = histogram(np.arange(7, 7 + spread))
    assert found is not None
    counts = list(found.counts)
    assert len(counts) <= 20
    assert sum(counts) == spread
    *full, last = counts
    assert len(set(full)) == 1
    assert last <= full[0]


def test_numbers_with_fractions_are_all_counted() -> None:
    found = histogram(np.linspace(-1.0, 2.0, 500, dtype=np.float32))
    assert found is not None
    assert (found.low, found.high, len(found.counts), sum(found.counts)) == (-1.0, 2.0, 20, 500)


def test_equal_numbers_are_one_bin_and_numbers_that_are_not_finite_none() -> None:
    assert histogram(np.array([0.5, 0.5])) == Histogram(0.0, 1.0, (2,))
    assert histogram(np.array([np.nan, np.inf, 0.5])) == Histogram(0.0, 1.0, (1,))
    assert histogram(np.array([np.nan])) is None
    assert histogram(np.array([], np.int64)) is None


@pytest.mark.parametrize("kind", [np.float32, np.float64])
def test_numbers_that_differ_in_their_last_place_are_at_the_two_ends(kind: type[np.floating[Any]]) -> None:
    low = kind(1)
    high = np.nextafter(low, kind(2))
    found = histogram(np.array([low, high, high]))
    assert found == Histogram(float(low), float(high), (1, *[0] * 18, 2))


@pytest.mark.parametrize("kind", [np.float32, np.float64])
def test_numbers_as_far_apart_as_can_be_are_counted(kind: type[np.floating[Any]]) -> None:
    far = np.finfo(kind).max
    found = histogram(np.array([-far, -far, far, np.inf], kind))
    assert found == Histogram(-float(far), float(far), (2, *[0] * 18, 1))


def test_a_history_keeps_histograms_and_columns_leave_them_out(tmp_path) -> None:
    from msgspec.structs import replace

    row = replace(update_row(1), histograms={"length": Histogram(1.0, 3.0, (4, 5))})
    history = run_history(tmp_path / HISTORY_NAME)
    history.append(row)
    found = list(run_history(tmp_path / HISTORY_NAME).read_strictly())
    assert found == [row]
    assert "histograms" not in columns(found, "update")
