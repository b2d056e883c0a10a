"""The figures of a run that is watched: what counts, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ops.bench.watching import tokens_per_s
from protocol.errors import DataError
from tests.pipeline.observability.rows import update_row


def test_only_updates_after_the_watchers_start_count() -> None:
    slow = [replace(update_row(n), at_s=100.0 + 5.0 * n, num_trained_tokens=10) for n in range(3)]
    fast = [replace(update_row(n), at_s=110.0 + n, num_trained_tokens=800) for n in range(1, 5)]
    assert tokens_per_s([*slow, *fast]) == 800.0


def test_a_run_that_ends_before_the_watchers_have_started_is_refused() -> None:
    rows = [replace(update_row(n), at_s=100.0 + n) for n in range(9)]
    with pytest.raises(DataError, match="--updates a larger number"):
        tokens_per_s(rows)
