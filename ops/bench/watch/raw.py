"""The raw outcomes as JSON, and back: a line a window."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ops.bench.watch.scoring import Outcome
from protocol.errors import DataError

_COLUMNS = (
    "fleet",
    "size",
    "label",
    "index",
    "kinds",
    "limits_s",
    "delays_s",
    "num_wrong",
    "false_alarms",
    "watched_s",
    "first",
)


def write_raw(
    path: Path, about: Mapping[str, Any], outcomes: Mapping[str, Sequence[Outcome]], cost: Mapping[str, float]
) -> None:
    """Write the outcomes of each detector, a window a line, infinite delays as null."""
    head = {**about, "tick_cost": dict(cost), "columns": list(_COLUMNS)}
    lines = [json.dumps(head)[:-1] + ', "outcomes": {']
    for place, (name, rows) in enumerate(outcomes.items()):
        lines.append(f"{json.dumps(name)}: [")
        lines += [json.dumps(_row(row)) + ("," if number < len(rows) else "") for number, row in enumerate(rows, 1)]
        lines.append("]" + ("," if place + 1 < len(outcomes) else ""))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([*lines, "}}"]) + "\n", encoding="utf-8")


def read_raw(path: Path) -> tuple[dict[str, Any], dict[str, list[Outcome]]]:
    """Return what ``write_raw`` wrote: the run's description, and the outcomes."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {error}; expected a file of headrace bench watch --json") from error
    rows = content.pop("outcomes")
    return content, {name: [_outcome(dict(zip(_COLUMNS, row, strict=True))) for row in of] for name, of in rows.items()}


def _row(outcome: Outcome) -> list[Any]:
    delays = [round(delay, 1) if math.isfinite(delay) else None for delay in outcome.delays_s]
    return [list(delays) if name == "delays_s" else getattr(outcome, name) for name in _COLUMNS]


def _outcome(row: dict[str, Any]) -> Outcome:
    row["delays_s"] = tuple(math.inf if delay is None else delay for delay in row["delays_s"])
    row["kinds"], row["limits_s"] = tuple(row["kinds"]), tuple(row["limits_s"])
    return Outcome(**row)
