"""The constants of the watch, and how much more evidence a larger fleet needs.

The more workers, the higher the largest strength by chance. Strength is evidence divided by the
need of a single worker, and in a window of 15 minutes each healthy worker has a largest one. A
share of these lies above ``start``, with an exponential tail, so a fleet of N workers has one above
``start + slope ln(share N / alpha)`` in a share alpha of windows.

The persistence of an anomaly counts by its third power: a doubled limit needs twice the evidence
but only a quarter more time, since bursts are bounded and alarms must not wait."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from pipeline.runtime.liveness import SILENT_AFTER_S
from protocol.errors import DataError

ALPHA: Final = 0.01
"""Share of benign windows of 15 minutes in which a fleet may blame a worker."""
SHARE, LEAST_SHARE, NUM_IN_TAIL = 0.02, 0.002, 30
"""Largest and smallest share of the workers' largest strengths that the tail is fitted to, and how
many strengths that should be. The far tail may be heavier than the near one."""
FEWEST: Final = 500
"""Fewest strengths, one per worker and window, that a fit needs: ten of them lie in the tail."""
FEWEST_WINDOWS: Final = 12
"""From this many windows on, the largest strengths of whole fleets are fitted, too."""
_EULER: Final = 0.5772
TIME_POWER: Final = 1.0 / 3.0
"""Power of a limit's factor by which the required time grows."""
SHIPPED: Final = Path(__file__).parent / "thresholds.json"
"""Made by ``python -m ops.bench.watch --calibrate`` from development windows."""


@dataclass(frozen=True, slots=True)
class Tail:
    """Exponential tail of the largest strengths of healthy workers: a ``share`` of them is above
    ``start``."""

    start: float
    slope: float
    share: float = SHARE
    num_strengths: int = 0
    """Strengths, one per healthy worker and window, that it was fitted to."""

    def strength(self, num_workers: int) -> float:
        """Return the strength that a fleet of this size exceeds in a share ALPHA of windows."""
        return self.start + self.slope * max(0.0, math.log(self.share * num_workers / ALPHA))


@dataclass(frozen=True, slots=True)
class Thresholds:
    """The tails of several fleet sizes, from which a fleet's limits follow."""

    tails: Mapping[int, Tail]

    def factor(self, num_workers: int) -> float:
        """Return the factor, at least 1, of a fleet's limits over those of a single worker.

        It comes from the tail of the nearest size. A larger fleet never has a lower factor."""
        if not self.tails or num_workers < 1:
            return 1.0
        nearest = min(self.tails, key=lambda size: abs(math.log(size / num_workers)))
        smaller = [tail.strength(size) for size, tail in self.tails.items() if size < min(nearest, num_workers)]
        return max(1.0, self.tails[nearest].strength(num_workers), *smaller)

    def write(self, path: Path) -> None:
        tails = {str(size): asdict(tail) for size, tail in sorted(self.tails.items())}
        path.write_text(json.dumps({"tails": tails}, indent=1) + "\n", encoding="utf-8")


def read_thresholds(path: Path) -> Thresholds:
    """Read a file of thresholds. Raises DataError for any other file."""
    try:
        tails = {
            int(size): Tail(float(of["start"]), float(of["slope"]), float(of["share"]), int(of["num_strengths"]))
            for size, of in json.loads(path.read_text(encoding="utf-8"))["tails"].items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"{path}: not a file of thresholds ({type(error).__name__}: {error}); make one with headrace fleet watch calibrate"
        ) from error
    numbers = [number for tail in tails.values() for number in (tail.start, tail.slope, tail.share)]
    if not tails or not all(map(math.isfinite, numbers)) or min(*tails, *numbers) < 0 or 0 in tails:
        raise DataError(
            f"{path}: thresholds below 0, not finite, or for no size; make them with headrace fleet watch calibrate"
        )
    return Thresholds(tails)


def fit(strengths: NDArray[np.floating], highest: Sequence[float] = (), num_workers: int = 1) -> Tail:
    """Fit the tail to the largest strengths of healthy workers, one per worker and window.

    ``highest``: the largest of each window, for ``num_workers`` workers. Windows also differ as a
    whole, in a way that their workers share, so from ``FEWEST_WINDOWS`` on these are fitted, too,
    by Gumbel's distribution (1958), and the stricter tail is returned. Raises DataError for fewer
    strengths than ``FEWEST``."""
    if len(strengths) < FEWEST:
        raise DataError(
            f"{len(strengths)} windows of 15 minutes, counted per worker; expected at least {FEWEST} of healthy workers"
        )
    ordered = np.sort(strengths)[::-1]
    share = min(SHARE, max(LEAST_SHARE, NUM_IN_TAIL / len(ordered)))
    above = ordered[: round(share * len(ordered))]
    start = float(above[-1])
    tail = Tail(round(start, 4), round(float(np.mean(above) - start), 4), round(share, 6), len(ordered))
    if len(highest) < FEWEST_WINDOWS:
        return tail
    slope = float(np.std(highest, ddof=1)) * math.sqrt(6.0) / math.pi
    start = float(np.mean(highest)) - _EULER * slope
    whole = Tail(max(0.0, round(start, 4)), round(slope, 4), 1.0 / num_workers, len(ordered))
    return max(tail, whole, key=lambda one: one.strength(num_workers))


def merged(parts: Iterable[Thresholds]) -> Thresholds:
    """Merge thresholds. For a size that occurs twice the last tail counts."""
    return Thresholds({size: tail for part in parts for size, tail in part.tails.items()})


NO_THRESHOLDS: Final = Thresholds({})
"""The limits of a single worker, by which strengths are measured."""


@cache
def shipped() -> Thresholds:
    return read_thresholds(SHIPPED)


@dataclass(frozen=True, slots=True)
class Tuning:
    silent_s: float = SILENT_AFTER_S
    """Age of the last heartbeat from which a worker is silent."""
    hung_s: float = 8.0
    """Shortest standstill with work in flight that counts as a hang."""
    hung_gaps: float = 3.0
    """Shortest hang as a multiple of the role's usual longest gap (99 %) between two steps of
    progress."""
    error_rate: float = 0.03
    """Errors per second that are usual everywhere."""
    error_clip: float = 5.0
    """Most evidence that the errors of one frame contribute."""
    max_version_lag: float = 3.0
    """Versions behind the published one that are never stale: the staleness limit plus one."""
    disk_share: float = 0.05
    """Share of a disk that must be free."""
    disk_left_s: float = 600.0
    """A disk that is predicted to be full within this time is bad."""
    clock_ms: float = 250.0
    """Difference of clocks that counts as skew."""
    norm_factor: float = 5.0
    """Most that a gradient norm may be, as a multiple of the usual one."""
    reward_z: float = 6.0
    """Standard errors by which one scorer's mean reward must differ from the others'."""
    leak_bytes: float = 2.5e8
    """Steady growth of memory in ``leak_s``, beyond the peers', that counts as a leak."""
    leak_s: float = 60.0
    """Time over which growth is measured."""
    common_share: float = 0.3
    """Share of a role above which an anomaly is common, and no worker is blamed."""

    warm_up_s: float = 45.0
    """Length of its own past that a worker needs before it is compared."""
    memory_s: float = 600.0
    """Time over which a worker's own usual level is learned."""
    doubt_s: float = 45.0
    """How long a short past is doubted, per factor e of the fleet's size."""
    fast_s: float = 6.0
    """Time constant of the fast view."""
    block_s: float = 5.0
    """Length of a block of the slow view."""
    num_blocks: int = 25
    """Blocks of the slow view's running median, which ignores bursts of less than half of them."""
    burst_share: float = 0.4
    """Share of them that a burst may fill in a large fleet, in which other workers' noise adds to
    it."""
    filled_s: float = 15.0
    """How long a worker's last sample replaces missing ones."""
    high: float = 3.5
    """Robust deviations above which a score is evidence."""
    high_normalised: float = 2.8
    """The same for metrics with the size of the work divided out, which are the strongest
    evidence."""
    most: float = 12.0
    """Most robust deviations that one moment contributes."""
    max_step_s: float = 60.0
    """Longest time that one frame or block counts for."""
    burst_s: float = 45.0
    """Length of bursts that any healthy worker may have."""
    fast_limit: float = 150.0
    """Limit of evidence in the fast view: robust deviations above ``high``, times seconds."""
    fast_persistence_s: float = 70.0
    """How long a worker must stay odd in the fast view."""
    slow_limit: float = 60.0
    """The same limits in the slow view, from which bursts have been removed."""
    slow_persistence_s: float = 25.0
    record_margin: float = 1.5
    """Factor by which an anomaly must exceed the largest one that ended by itself."""
    record_s: float = 3600.0
    """Half-life of the memory of that largest one."""
    max_named: int = 3
    """Most workers that may be odd on one metric at once; more are a common cause."""
