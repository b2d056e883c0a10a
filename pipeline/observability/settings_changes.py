"""Changes of a run's settings and their effects: a few updates before and after each.

The supervisor writes the changes to ``settings-changes.json`` in the run's folder, and each row of the
history has the number of the change in force."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from pipeline.config import CHANGES_NAME
from pipeline.observability.history import HISTORY_NAME, UpdateRow, run_history
from pipeline.runtime.registry.settings_change import SettingsChange
from protocol.errors import DataError

NUM_COMPARED = 20
"""Maximum number of updates compared on each side of a change."""


@dataclass(frozen=True, slots=True)
class Means:
    """Averages over some updates."""

    num_updates: int
    updates_per_s: float | None
    """None for fewer than two updates."""
    learning_rate: float
    loss: float
    accuracy: float


@dataclass(frozen=True, slots=True)
class Effect:
    """A change, and the updates around it."""

    change: SettingsChange
    first_update: int | None
    """The first update made with it, if any."""
    before: Means | None
    after: Means | None


def read_changes(run_dir: Path) -> list[SettingsChange]:
    """Return the changes of a run's settings in order; empty if there is no file. Raises DataError if it
    is damaged."""
    path = run_dir / CHANGES_NAME
    try:
        return msgspec.json.decode(path.read_bytes(), type=list[SettingsChange])
    except FileNotFoundError:
        return []
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path} cannot be read: {error}; the supervisor of a running run writes it again") from None


def effects(changes: Iterable[SettingsChange], updates: Sequence[UpdateRow]) -> list[Effect]:
    """Return each change with up to ``NUM_COMPARED`` of ``updates`` before it, and as many made with it."""
    found: list[Effect] = []
    for change in changes:
        made = [place for place, row in enumerate(updates) if row.settings_change == change.number]
        if not made:
            found.append(Effect(change, None, None, None))
            continue
        first, end = made[0], made[-1] + 1
        before = updates[max(0, first - NUM_COMPARED) : first]
        after = updates[first : min(end, first + NUM_COMPARED)]
        found.append(Effect(change, updates[first].update, _means(before), _means(after)))
    return found


def read_effects(run_dir: Path) -> list[Effect]:
    """Return each change of a run's settings with its effect, from the run's files; empty if the changes
    cannot be read."""
    try:
        changes = read_changes(run_dir)
    except DataError:
        return []
    rows = run_history(run_dir / HISTORY_NAME).read()[0] if changes else ()
    return effects(changes, [row for row in rows if isinstance(row, UpdateRow)])


def in_words(effect: Effect) -> str:
    """Describe a change and its effect in one sentence."""
    why = f" ({effect.change.reason})" if effect.change.reason else ""
    return f"{change_words(effect.change)}, by {effect.change.by}{why}; {'; '.join(effect_words(effect))}"


def effect_figures(found: Sequence[Effect]) -> list[dict[str, Any]]:
    """Convert effects to plain values for JSON; means that are not finite become None."""
    return msgspec.json.decode(msgspec.json.encode(list(found)))


def _means(rows: Sequence[UpdateRow]) -> Means | None:
    if not rows:
        return None
    span_s = rows[-1].at_s - rows[0].at_s
    rate = (len(rows) - 1) / span_s if len(rows) > 1 and span_s > 0.0 else None
    return Means(
        len(rows),
        rate,
        _mean([row.learning_rate for row in rows]),
        _mean([row.loss for row in rows]),
        _mean([row.accuracy for row in rows]),
    )


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if all(map(math.isfinite, values)) else math.nan


def change_words(change: SettingsChange) -> str:
    """Describe a change on one line: ``change 2: learner.learning_rate 1e-4, was 2e-4``."""
    sets = ", ".join(f"{key} {value}, was {change.former.get(key, 'unset')}" for key, value in change.sets.items())
    undone = ", ".join(map(str, change.undone)) or (f"{change.undoes} and those after it" if change.undoes else "")
    return f"change {change.number}{f', which undoes {undone}' if undone else ''}: {sets}"


def effect_words(effect: Effect) -> list[str]:
    """Describe a change's effect as lines, or as one line if no update was made with it."""
    if effect.first_update is None or effect.after is None:
        return ["no update was made with it"]
    sides = [("before", effect.before), (f"from update {effect.first_update}", effect.after)]
    return [f"{name}: {_words(means)}" for name, means in sides if means is not None]


def _words(means: Means) -> str:
    rate = "" if means.updates_per_s is None else f", {means.updates_per_s:.3g} updates/s"
    return (
        f"{means.num_updates} updates{rate}, learning rate {means.learning_rate:.3g}, loss {means.loss:.4g}, "
        f"accuracy {100 * means.accuracy:.1f} %"
    )
