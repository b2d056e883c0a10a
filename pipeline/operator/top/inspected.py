"""Versions, staleness and drops in words, for ``headrace top``. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipeline.ledger.inspection import DropsView, EndedRow, StalenessView
from pipeline.operator.overview import RunOverview
from pipeline.operator.top.words import NONE, staleness
from protocol.printable import printable_line

_MAX_COLUMNS = 8
"""Values of staleness with a column of their own; larger ones share the last."""


@dataclass(frozen=True, slots=True)
class InspectionView:
    """The ledger's looks that a view shows."""

    versions: StalenessView
    drops: DropsView


def version_lines(run: RunOverview, found: InspectionView | None) -> list[str]:
    """Return which versions sample, how stale the newest update was, and units by staleness."""
    versions = run.versions
    lines = [f"published: version {versions.published}"]
    for version, number in sorted(versions.sampling.items(), reverse=True):
        behind = versions.published - version
        name = "no weights yet" if version < 0 else f"version {version}"
        lag = f", {behind} behind" if version >= 0 and behind > 0 else ""
        lines.append(f"  {name}: {number} generator{'' if number == 1 else 's'}{lag}")
    lines.append(f"newest update: {staleness(run)}")
    return lines if found is None else [*lines, "", *_histogram(found.versions)]


def _histogram(view: StalenessView) -> list[str]:
    counts: dict[str, Mapping[int, int]] = {
        "running": view.running,
        "ready": view.ready,
        "claimed": view.claimed,
        "trained": view.trained,
        **{f"dropped: {printable_line(reason)}": by for reason, by in view.dropped.items() if by},
    }
    top = min(_MAX_COLUMNS - 1, max([view.eta, *(value for by in counts.values() for value in by)]))
    is_cut = any(value > top for by in counts.values() for value in by)
    names = [str(value) for value in range(top + 1)]
    if is_cut:
        names[-1] += "+"
    lines = [f"units ({view.unit}) by staleness, in versions; the limit is {view.eta}", _line("", names)]
    for name, by in counts.items():
        cells = [sum(number for value, number in by.items() if min(value, top) == column) for column in range(top + 1)]
        lines.append(_line(name, [f"{cell:,}" if cell else NONE for cell in cells]))
    if view.num_unbegun:
        lines.append(f"and {view.num_unbegun:,} running units without a token")
    return lines


def drop_lines(run: RunOverview, found: InspectionView | None) -> list[str]:
    """Return what was dropped by reason, with length and difficulty, against what was trained."""
    if found is None:
        return [run.trouble or "the ledger has not answered yet"]
    head = ("groups", "responses", "tokens", "length", "difficulty")
    lines = [_line("", head, 11), _line("trained", _cells(found.drops.trained), 11)]
    lines += [_line(f"dropped: {printable_line(row.reason)}", _cells(row), 11) for row in found.drops.dropped]
    if not found.drops.dropped:
        lines.append("nothing was dropped")
    lines += ["", "length: tokens in the mean; difficulty: 1 less the mean accuracy of its group"]
    return [*lines, *(f"! {printable_line(warning)}" for warning in found.drops.warnings)]


def _cells(row: EndedRow) -> list[str]:
    length, difficulty = row.responses.mean_length, row.responses.mean_difficulty
    return [
        f"{row.num_groups:,}",
        f"{row.num_trajectories:,}",
        f"{row.num_tokens:,}",
        NONE if length is None else f"{length:,.1f}",
        NONE if difficulty is None else f"{difficulty:.2f}",
    ]


def _line(name: str, cells: Sequence[str], width: int = 7) -> str:
    return f"{name:<22}" + "".join(f"{cell:>{width}}" for cell in cells)
