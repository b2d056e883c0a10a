"""The run's configured limits, which the invariants read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

Found = Iterator[str]
"""Violations of one invariant, in words."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The run's configured limits."""

    eta: int
    group_size: int
    num_slots: int
    window_tokens: int
    num_updates: int = 0
    """That the run was to take."""
    max_attempts: int = 1
    """Failed tries of a scorer, until a chunk is a dead letter."""
    max_rss_bytes: int = 1 << 30
