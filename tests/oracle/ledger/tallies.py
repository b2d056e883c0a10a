"""Sums over all that left the in-memory ledger, as ``parts/tallies.lua`` keeps them."""

from __future__ import annotations

from collections import Counter

from pipeline.ledger.inspection import MAX_STALENESS
from pipeline.ledger.types import DropReason
from tests.oracle.ledger.records import GroupRecord


def tally_unit(tallies: Counter[str], reason: DropReason | None, oldest: int | None, made: int) -> None:
    """Count a unit that leaves. ``oldest``: updates in its oldest token; ``made``: in the version
    that it is judged by."""
    if oldest is not None:
        tallies[f"{_end(reason)}:staleness:{min(max(made - oldest, 0), MAX_STALENESS)}"] += 1


def tally_response(tallies: Counter[str], reason: DropReason | None, num_tokens: int, group: GroupRecord) -> None:
    """Count a finished response that leaves."""
    name = _end(reason)
    tallies[f"{name}:responses"] += 1
    tallies[f"{name}:tokens"] += num_tokens
    tallies[f"{name}:squares"] += num_tokens * num_tokens
    if group.accuracies:
        tallies[f"{name}:judged"] += 1
        tallies[f"{name}:difficulty"] += group.difficulty


def _end(reason: DropReason | None) -> str:
    return "trained" if reason is None else f"dropped:{reason.value}"
