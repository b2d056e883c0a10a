"""The data of the watch: frames of metrics, the catalogue of known metrics, rule results and
findings.

A metric that is not in the catalogue is compared, too: in both directions, with a floor relative to
its role."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from pipeline.fleet.peers.groups import Floats, Groups


@dataclass(frozen=True, slots=True)
class Frame:
    """The metrics of a fleet at one moment. Never changed once it is made."""

    time_s: float
    """By the reader's clock; grows from frame to frame."""
    workers: tuple[str, ...]
    """Names, each once. The same object as long as the fleet is the same."""
    roles: tuple[str, ...]
    """[workers]. Workers are compared only within a role."""
    metrics: tuple[str, ...]
    """Names, each once, of the catalogue or any others."""
    values: NDArray[np.float32]
    """[workers, metrics]. NaN: no sample. Infinity: a sample that is not finite."""
    phases: tuple[str, ...] | None = None
    """[workers]. If given, workers are compared within a role and phase."""
    expected_s: NDArray[np.float32] | None = None
    """[workers] How long each worker's current piece of work may take, judged by its own past."""


class Direction(IntEnum):
    """Which deviation from the peers is bad."""

    LOW = -1
    BOTH = 0
    HIGH = 1


@dataclass(frozen=True, slots=True)
class Metric:
    name: str
    unit: str
    bad: Direction = Direction.BOTH
    floor: float = 0.05
    """Smallest deviation that counts, relative to the role's median."""
    floor_in_units: float = 0.0
    """Smallest deviation that counts, in the metric's unit. The larger of both floors holds. 0 for
    an unknown unit."""
    is_counter: bool = False
    """Whether it only grows until a worker restarts. Its rate is compared."""
    is_compared: bool = True
    """Whether similarity judges it. The others are for rules only."""
    kind: str = "odd"
    """Kind of the finding that similarity makes of it."""
    is_load: bool = False
    """Whether it depends on the size of the work that a worker happens to have."""
    is_use: bool = False
    """Whether it falls when a worker has nothing to do."""
    is_normalised: bool = False
    """Whether the size of the work has been divided out."""
    counts_work: bool = False
    """Whether it counts finished pieces of work. A mean over them is over that many samples."""
    shows_size: bool = False
    """Whether it rises when a worker has larger pieces of work. It explains other deviations, and
    is no evidence itself."""
    is_filled: bool = False
    """Whether it rises once when work of a new kind begins, such as memory in the first update."""
    is_shared: bool = False
    """Whether it measures something that all workers share. When it rises for all, other metrics
    follow."""


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
    """Return a metric of the catalogue, or an unknown metric without a unit."""
    return CATALOGUE.get(name) or Metric(name, "")


@dataclass(frozen=True, slots=True)
class Finding:
    """One odd worker, as in the JSON of ``headrace fleet watch``."""

    worker: str
    role: str
    since_s: float
    """Estimated onset, by the frames' clock."""
    alarm_s: float
    """Time of the frame that completed the evidence."""
    kind: str
    """silent, hung, slow, leak, stale, errors, refused, disk, clock, numeric, reward or odd."""
    metric: str
    """The metric with the strongest evidence."""
    score: float
    """Evidence divided by its limit: above 1."""
    sentence: str
    """Observation and limit in plain words."""


Flags = NDArray[np.bool_]
Columns = Mapping[str, Floats]
"""All workers' values of each metric."""
Sentence = Callable[[int], str]


@dataclass(frozen=True, slots=True)
class RuleResult:
    kind: str
    metric: str
    is_bad: Flags
    """[workers]"""
    is_known: Flags
    """[workers]; the others keep their state."""
    score: NDArray[np.floating[Any]]
    """[workers]: the observed value divided by the limit."""
    sentence: Sentence
    hold_s: float = 0.0
    """How long it must be bad. If above 0, also for at least three frames."""
    is_near: Flags | None = None
    """[workers]: also true near the limit, since workers cross a limit one by one even when all
    stall."""
    lasted_s: Floats | None = None
    """[workers]: for how many seconds it has been bad, if the metric knows."""
    shared: NDArray[np.intp] | None = None
    """[workers]: workers with the same number share the bad resource. They count once, and only one
    is named."""


def first_of_each(flags: Flags, shared: NDArray[np.intp] | None) -> Flags:
    """Return the flags, keeping only the first of the workers that share something."""
    if shared is None:
        return flags
    places = np.flatnonzero(flags)
    first = np.zeros(len(flags), bool)
    first[places[np.unique(shared[places], return_index=True)[1]]] = True
    return first


def of_peers(values: Floats, groups: Groups) -> Floats:
    """Return the median of each worker's role, [workers]: in a small role that of the other
    workers, and 0 for a worker alone."""
    found = groups.others(values[None, :], groups.medians(values[None, :]))[0]
    return np.where(groups.sizes() == 1, 0.0, found).astype(np.float32)
