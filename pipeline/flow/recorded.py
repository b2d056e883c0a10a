"""Rows of the flow as they are kept in a run's folder, for ``headrace run trace`` after the fact."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from operator import attrgetter
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from pipeline.flow.rows import LinkRow, StateRow

STATES: Final = "states"
LINKS: Final = "links"
_TEXTS: Final = frozenset({"worker", "role", "waiting_for", "sender", "receiver"})


def recorded(
    states: Sequence[StateRow], links: Sequence[LinkRow], *, ahead_s: float, given_s: float
) -> dict[str, NDArray[np.void]]:
    """Return the rows of a moment by table, with times by the wall clock.

    Args:
        states: of all workers.
        links: of all links.
        ahead_s: the wall clock less the clock of the rows.
        given_s: this moment by the wall clock. A silent worker's row is older."""
    rows: Mapping[str, tuple[type[StateRow | LinkRow], Sequence[Any]]] = {
        STATES: (StateRow, states),
        LINKS: (LinkRow, links),
    }
    return {name: _array(kind, found, ahead_s, given_s) for name, (kind, found) in rows.items() if found}


def _array(kind: type[StateRow | LinkRow], rows: Sequence[Any], ahead_s: float, given_s: float) -> NDArray[np.void]:
    names = [one.name for one in fields(kind)]
    form = np.dtype([*((name, "O" if name in _TEXTS else "f8") for name in names), ("given_s", "f8")])
    cells = attrgetter(*names)
    made = np.array([(*cells(row), given_s) for row in rows], form)
    made["time_s"] += ahead_s
    return made
