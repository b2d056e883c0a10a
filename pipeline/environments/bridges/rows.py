"""What the bridges read from a row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from protocol.errors import EnvironmentFailed


def seed_of(row: Mapping[str, Any], who: str) -> int:
    """Return the row's seed. Raises EnvironmentFailed, beginning with ``who``, if it has none."""
    seed = row.get("seed")
    if type(seed) is not int or not 0 <= seed < 2**32:
        raise EnvironmentFailed(
            f"{who}: seed is {seed!r:.40}; give each line a column seed with a whole number from 0, below 2**32"
        )
    return seed


def index_of(row: Mapping[str, Any], who: str, of_what: str) -> int:
    """Return the row's index. Raises EnvironmentFailed, beginning with ``who``, if it has none."""
    index = row.get("index")
    if type(index) is not int or index < 0:
        raise EnvironmentFailed(f"{who}: index is {index!r:.40}; give each line a column index, {of_what}")
    return index
