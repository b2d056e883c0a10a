"""The tallies of what left a ledger, read: by name, as ``redis/scripts/parts/tallies.lua`` keeps
them."""

from __future__ import annotations

from collections.abc import Mapping

from pipeline.ledger.inspection import DropsView, EndedRow, ResponseTally
from pipeline.ledger.types import DropReason

_TRAINED = "trained"
_STALENESS = ":staleness:"


def staleness_of(tallies: Mapping[str, int]) -> tuple[dict[int, int], dict[str, dict[int, int]]]:
    """Return the units by staleness: the trained ones, and the dropped ones by reason."""
    found: dict[str, dict[int, int]] = {}
    for name, number in tallies.items():
        end, marked, behind = name.partition(_STALENESS)
        if marked and number:
            found.setdefault(end, {})[int(behind)] = number
    ordered = {end: dict(sorted(counts.items())) for end, counts in found.items()}
    return ordered.get(_TRAINED, {}), {
        reason.value: counts for reason in DropReason if (counts := ordered.get(f"dropped:{reason.value}"))
    }


def drops_from(
    trained: Mapping[str, int],
    dropped: Mapping[str, Mapping[str, int]],
    tallies: Mapping[str, int],
    *,
    group_size: int,
) -> DropsView:
    """Return the drops against what was trained.

    Args:
        trained: By currency: groups, trajectories, tokens.
        dropped: By currency, then by reason.
        tallies: By name.
        group_size: Responses of one prompt."""
    by_reason = {
        reason.value: {currency: counts.get(reason.value, 0) for currency, counts in dropped.items()}
        for reason in DropReason
    }
    rows = (_row(reason, counts, f"dropped:{reason}", tallies) for reason, counts in by_reason.items())
    there = tuple(row for row in rows if row.num_trajectories or row.num_tokens)
    return DropsView(_row("", trained, _TRAINED, tallies), there, group_size)


def _row(reason: str, counts: Mapping[str, int], end: str, tallies: Mapping[str, int]) -> EndedRow:
    responses, tokens, squares, judged, difficulty = (
        tallies.get(f"{end}:{name}", 0) for name in ("responses", "tokens", "squares", "judged", "difficulty")
    )
    groups, trajectories, num_tokens = (counts.get(currency, 0) for currency in ("groups", "trajectories", "tokens"))
    return EndedRow(
        reason, groups, trajectories, num_tokens, ResponseTally(responses, tokens, squares, judged, difficulty)
    )
