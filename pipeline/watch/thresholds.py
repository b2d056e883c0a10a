"""The constants of the watch, and how much more evidence a larger fleet needs.

The more workers, the higher the largest strength by chance. In a window of 15 minutes each healthy
worker has a largest strength: evidence over the need of a single worker. A share of them lies above
``start``, with an exponential tail. A fleet of N workers then has one above ``start + slope ln(share N
/ alpha)`` in a share alpha of windows.

A strength counts the persistence of an oddity by its third power. So a doubled limit needs twice
the evidence, and a quarter more time: bursts are bounded, and alarms must not wait."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from protocol.errors import DataError

ALPHA: Final = 0.01
"""Share of benign windows of 15 minutes in which a fleet may blame a worker."""
SHARE, LEAST_SHARE, NUM_IN_TAIL = 0.02, 0.002, 30
"""Largest and smallest share of the workers' largest strengths that the tail is fitted to, and how
many it should have. Far out a tail may be heavier than near."""
FEWEST: Final = 500
"""Strengths, one a worker and window, that a fit needs: ten lie in the tail."""
FEWEST_WINDOWS: Final = 12
"""Windows from which on the largest strength of a whole fleet is fitted."""
_EULER: Final = 0.5772
TIME_POWER: Final = 1.0 / 3.0
"""Power of a limit's factor by which the time grows for which an oddity must last."""
SHIPPED: Final = Path(__file__).parent / "thresholds.json"
"""Made by ``python -m ops.bench.watch --calibrate`` from development windows."""


@dataclass(frozen=True, slots=True)
class Tail:
    """The tail of healthy workers' largest strengths."""

    start: float
    slope: float
    share: float = SHARE
    """Of the strengths, that are above ``start``."""
    num_strengths: int = 0
    """Healthy workers and windows of which it was fitted."""

    def strength(self, num_workers: int) -> float:
        """Return the strength that a fleet exceeds in a share ALPHA of windows."""
        return self.start + self.slope * max(0.0, math.log(self.share * num_workers / ALPHA))


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Tails by the size of the fleet that they were fitted at."""

    tails: Mapping[int, Tail]

    def factor(self, num_workers: int) -> float:
        """Return by which the limits of a fleet exceed those of a single worker; at least 1.

        The tail of the nearest size holds. A larger fleet never has a lower factor."""
        if not self.tails or num_workers < 1:
            return 1.0
        nearest = min(self.tails, key=lambda size: abs(math.log(size / num_workers)))
        smaller = [tail.strength(size) for size, tail in self.tails.items() if size < min(nearest, num_workers)]
        return max(1.0, self.tails[nearest].strength(num_workers), *smaller)

    def write(self, path: Path) -> None:
        """Write the file that ``read_thresholds`` reads."""
        tails = {str(size): asdict(tail) for size, tail in sorted(self.tails.items())}
        path.write_text(json.dumps({"tails": tails}, indent=1) + "\n", encoding="utf-8")


def read_thresholds(path: Path) -> Thresholds:
    """Return the thresholds of a file. Raises DataError for a file that is none."""
    try:
        tails = {
            int(size): Tail(float(of["start"]), float(of["slope"]), float(of["share"]), int(of["num_strengths"]))
            for size, of in json.loads(path.read_text(encoding="utf-8"))["tails"].items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"{path}: no file of thresholds ({type(error).__name__}: {error}); make one with headrace fleet watch calibrate"
        ) from error
    numbers = [number for tail in tails.values() for number in (tail.start, tail.slope, tail.share)]
    if not tails or not all(map(math.isfinite, numbers)) or min(*tails, *numbers) < 0 or 0 in tails:
        raise DataError(
            f"{path}: thresholds below 0, not finite, or for no size; make them with headrace fleet watch calibrate"
        )
    return Thresholds(tails)


def fit(strengths: NDArray[np.floating], highest: Sequence[float] = (), num_workers: int = 1) -> Tail:
    """Fit the tail to the largest strengths of healthy workers, one a worker and window.

    ``highest``: the largest of each window, if ``num_workers`` were in each. Windows differ as
    wholes, and the workers of one share that. So from ``FEWEST_WINDOWS`` on these are fitted, too,
    by Gumbel's distribution (1958). The tail that needs more holds. Raises DataError for fewer
    strengths than ``FEWEST``."""
    if len(strengths) < FEWEST:
        raise DataError(
            f"{len(strengths)} workers and windows of 15 minutes; expected at least {FEWEST} of healthy workers"
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
    """Return all tails; of two for one size the last."""
    return Thresholds({size: tail for part in parts for size, tail in part.tails.items()})


NO_THRESHOLDS: Final = Thresholds({})
"""The needs of a single worker, by which strengths are measured."""
_shipped: list[Thresholds] = []


def shipped() -> Thresholds:
    """Return the thresholds that the package brings."""
    if not _shipped:
        _shipped.append(read_thresholds(SHIPPED))
    return _shipped[0]


@dataclass(frozen=True, slots=True)
class Tuning:
    """Constants of both layers."""

    silent_s: float = 5.0
    """Age of the last heartbeat from which on a worker is silent."""
    hung_s: float = 8.0
    """Shortest standstill with work in flight that is a hang."""
    hung_gaps: float = 3.0
    """The same, in the role's usual longest gaps (99 %) between two steps of progress."""
    error_rate: float = 0.03
    """Errors a second that are usual everywhere."""
    error_clip: float = 5.0
    """Evidence that one frame's errors count at most."""
    max_version_lag: float = 3.0
    """Versions behind the published one that are never stale: the staleness limit and one more."""
    disk_share: float = 0.05
    """Share of a disk that must be free."""
    disk_left_s: float = 600.0
    """Forecast of a full disk that is too soon."""
    clock_ms: float = 250.0
    """Difference of clocks that is a skew."""
    norm_factor: float = 5.0
    """Times its usual gradient norm that a step may have."""
    reward_z: float = 6.0
    """Standard errors by which the mean reward of one scorer differs from the others'."""
    leak_bytes: float = 2.5e8
    """Steady growth of memory in ``leak_s``, above the peers', that is a leak."""
    leak_s: float = 60.0
    """Time over which growth is measured."""
    common_share: float = 0.3
    """Share of a role above which an oddity is common, and no worker is blamed."""

    warm_up_s: float = 45.0
    """Of each worker: its own past before it is compared."""
    memory_s: float = 600.0
    """Time over which a worker's own usual level is learned anew."""
    doubt_s: float = 45.0
    """Time by which a short past is doubted, for each time that a fleet is larger by a factor e."""
    fast_s: float = 6.0
    """Time constant of the fast view."""
    block_s: float = 5.0
    """Length of a block of the slow view."""
    num_blocks: int = 25
    """Blocks of the slow view's running median: it ignores bursts of less than half of them."""
    burst_share: float = 0.4
    """Share of them that a burst may fill in a large fleet, where the others' noise adds to it."""
    filled_s: float = 15.0
    """Time that a worker's last sample stands for missing ones."""
    high: float = 3.5
    """Robust deviations above which a score is evidence."""
    high_normalised: float = 2.8
    """The same of a metric without the size of the work, which is the strongest evidence."""
    most: float = 12.0
    """Robust deviations that one moment counts at most."""
    max_step_s: float = 60.0
    """Longest time that one frame or block counts for."""
    burst_s: float = 45.0
    """Length of bursts that every healthy worker may have."""
    fast_limit: float = 150.0
    """Evidence of the fast view: robust deviations above ``high``, times seconds."""
    fast_persistence_s: float = 70.0
    """Time for which a worker must stay odd in the fast view."""
    slow_limit: float = 60.0
    """The same two of the slow view, which has bursts taken out."""
    slow_persistence_s: float = 25.0
    record_margin: float = 1.5
    """By which an oddity exceeds the largest that ended by itself."""
    record_s: float = 3600.0
    """Time in which the memory of that one halves."""
    max_named: int = 3
    """Workers that are odd on one metric at once; more are common."""
