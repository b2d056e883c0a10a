"""The constants of the watch, each with its unit. Nothing of a fleet's data is in them."""

from __future__ import annotations

from dataclasses import dataclass


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
