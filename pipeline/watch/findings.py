"""What the watch finds: the result of one rule for all workers, and the finding about one worker."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.watch.groups import Floats, Groups


@dataclass(frozen=True, slots=True)
class Finding:
    """One odd worker. Its fields are those of the JSON of ``headrace fleet watch``."""

    worker: str
    role: str
    since_s: float
    """Estimated onset, by the clock of the frames."""
    alarm_s: float
    """Time of the frame that completed the evidence."""
    kind: str
    """silent, hung, slow, leak, stale, errors, refused, disk, clock, numeric, reward or odd."""
    metric: str
    """The metric with the strongest evidence."""
    score: float
    """Evidence over its limit: above 1."""
    sentence: str
    """Observation and limit in plain words."""


Flags = NDArray[np.bool_]
Columns = Mapping[str, Floats]
"""Of each metric the values of all workers."""
Sentence = Callable[[int], str]


@dataclass(frozen=True, slots=True)
class RuleResult:
    """The result of one rule at one moment."""

    kind: str
    metric: str
    is_bad: Flags
    """[workers]"""
    is_known: Flags
    """[workers]; others keep their state."""
    score: NDArray[np.floating[Any]]
    """[workers]: what was seen, over the limit."""
    sentence: Sentence
    hold_s: float = 0.0
    """Time for which it must be bad, and in three frames at least if above 0."""
    is_near: Flags | None = None
    """[workers]: near the limit, too. Workers cross a limit one by one when all stand still."""
    lasted_s: Floats | None = None
    """[workers]: since when it is bad, seconds ago, where the metric knows."""
    shared: NDArray[np.intp] | None = None
    """[workers]: workers with one number share what is bad. They count once, and one is named."""


def first_of_each(flags: Flags, shared: NDArray[np.intp] | None) -> Flags:
    """Return the flags, of workers that share something only the first one's."""
    if shared is None:
        return flags
    places = np.flatnonzero(flags)
    first = np.zeros(len(flags), bool)
    first[places[np.unique(shared[places], return_index=True)[1]]] = True
    return first


def of_peers(values: Floats, groups: Groups) -> Floats:
    """Return the median of each worker's role, [workers]; in a small role of the others; or 0."""
    found = groups.others(values[None, :], groups.medians(values[None, :]))[0]
    return np.where(groups.sizes() == 1, 0.0, found).astype(np.float32)
