"""The data of the watch: frames of metrics, the catalogue of known metrics, rule results and findings.

A metric that is not in the catalogue is compared too: in both directions, with a floor relative to
its role."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from pipeline.watch.groups import Floats, Groups


@dataclass(frozen=True, slots=True)
class Frame:
    """One moment of a fleet. Nothing of it is changed once it is made."""

    time_s: float
    """By the reader's clock; grows from frame to frame."""
    workers: tuple[str, ...]
    """Names, each once. The same object as long as the fleet is the same."""
    roles: tuple[str, ...]
    """Of each worker. Workers are compared inside a role only."""
    metrics: tuple[str, ...]
    """Names, each once, of the catalogue or any others."""
    values: NDArray[np.float32]
    """[workers, metrics]. NaN: no sample. Infinity: a sample that is no finite number."""
    phases: tuple[str, ...] | None = None
    """Of each worker; workers are then compared inside a role and phase."""
    expected_s: NDArray[np.float32] | None = None
    """[workers] How long each one's present work may stand, by its own past."""


class Direction(IntEnum):
    """Which deviation from the peers is bad."""

    LOW = -1
    BOTH = 0
    HIGH = 1


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric of workers."""

    name: str
    unit: str
    bad: Direction = Direction.BOTH
    floor: float = 0.05
    """Smallest deviation of a role that is believed, relative to the role's median."""
    floor_in_units: float = 0.0
    """The same in the metric's unit; the larger of both holds. 0 for an unknown unit."""
    is_counter: bool = False
    """Whether it only grows until a worker starts anew: its rate is compared."""
    is_compared: bool = True
    """Whether similarity judges it; rules read the others."""
    kind: str = "odd"
    """Kind of a finding that similarity makes of it."""
    is_load: bool = False
    """Whether it follows the sizes of the work that a worker happens to have."""
    is_use: bool = False
    """Whether it falls when a worker has nothing to do."""
    is_normalised: bool = False
    """Whether the size of the work is taken out of it."""
    counts_work: bool = False
    """Whether it counts finished pieces of work: so many are in a mean over them."""
    shows_size: bool = False
    """Whether it rises when a worker has larger pieces of work. It explains, and is no evidence."""
    is_filled: bool = False
    """Whether it rises once, as work of a new kind begins: memory of a first update."""
    is_shared: bool = False
    """Whether it measures what all workers share: when it rises for all, others follow."""


_ALL: Final = (
    Metric("heartbeat_age_s", "s", Direction.HIGH, is_compared=False, kind="silent"),
    Metric("finished_age_s", "s", Direction.HIGH, is_compared=False, kind="silent"),
    Metric("longest_piece_s", "s", is_compared=False),
    Metric("progress", "steps", Direction.LOW, 0.10, is_counter=True, kind="slow", is_load=True),
    Metric("turns", "turns", Direction.LOW, 0.10, is_counter=True, kind="slow", is_load=True),
    Metric("steps", "steps", is_counter=True, is_compared=False),
    Metric("done", "pieces", Direction.LOW, 0.10, is_counter=True, kind="slow", is_load=True, counts_work=True),
    Metric("in_flight", "pieces", Direction.HIGH, 0.10, 1.0, is_load=True),
    Metric("oldest_age_s", "s", Direction.HIGH, 0.20, 1.0, kind="slow", shows_size=True),
    Metric("input_depth", "pieces", Direction.HIGH, 0.20, 2.0, is_load=True),
    Metric("output_depth", "pieces", Direction.HIGH, 0.20, 2.0, is_load=True),
    Metric("loop_lag_ms", "ms", Direction.HIGH, 0.20, 5.0, kind="slow"),
    Metric("cpu", "cores", Direction.BOTH, 0.05, 0.02, is_use=True),
    Metric("rss_bytes", "bytes", Direction.HIGH, 0.03, 1e8, kind="leak", is_filled=True),
    Metric("num_fds", "files", Direction.HIGH, 0.10, 4.0, kind="leak"),
    Metric("disk_free_bytes", "bytes", Direction.LOW, 0.05, kind="disk"),
    Metric("disk_free_share", "share", Direction.LOW, 0.05, 0.02, kind="disk"),
    Metric("gpu_util", "share", Direction.LOW, 0.05, kind="slow", is_use=True),
    Metric("gpu_mem_bytes", "bytes", Direction.HIGH, 0.03, 1e8, kind="leak", is_filled=True),
    Metric("gpu_power_w", "W", Direction.BOTH, 0.05, 5.0, is_use=True),
    Metric("tokens_per_s", "tokens/s", Direction.LOW, kind="slow", is_use=True),
    Metric("service_ratio", "ratio", Direction.HIGH, 0.08, kind="slow", is_normalised=True),
    Metric("work_done", "expected seconds", Direction.LOW, 0.10, is_counter=True, kind="slow", counts_work=True),
    Metric("errors", "errors", Direction.HIGH, 0.10, 0.05, is_counter=True, kind="errors"),
    Metric("retries", "retries", Direction.HIGH, 0.10, 0.10, is_counter=True),
    Metric("refused", "messages", Direction.HIGH, 0.10, 0.05, is_counter=True, kind="refused"),
    Metric("version_lag", "versions", Direction.HIGH, 0.10, 0.5, kind="stale"),
    Metric("clock_ahead_ms", "ms", is_compared=False, kind="clock"),
    Metric("ledger_rtt_ms", "ms", Direction.HIGH, 0.20, 0.6, is_shared=True),
    Metric("reward_mean", "reward", is_compared=False, kind="reward"),
    Metric("loss", "loss", Direction.BOTH, is_compared=False, kind="numeric"),
    Metric("grad_norm", "norm", Direction.HIGH, is_compared=False, kind="numeric"),
)
CATALOGUE: Final[Mapping[str, Metric]] = {one.name: one for one in _ALL}


def metric(name: str) -> Metric:
    """Return what the catalogue knows of a name, or an unknown metric without a unit."""
    return CATALOGUE.get(name) or Metric(name, "")


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
