"""The workers of a synthetic fleet, and which of them gets which fault.

The draw of a fault knows roles and hosts, and nothing of how a fleet makes its signals."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ops.bench.watch.cases import CONCURRENT, SINGLE, SLOW_BY, Case, Control, Fault, Kind, Truth

EARLIEST_S, LATEST_S = 300.0, 600.0
"""Range of a fault's onset, and of a control's begin."""
BURST_S = (5, 45)
"""Shortest and longest burst of a healthy worker or host, in seconds."""
CALM_S = 120.0
"""Least time from one burst's end to the next: two in a row would be slowness."""
MAX_APART_S = 90.0
"""From the first onset to the last of concurrent faults."""
_SCORERS = ("reward", "reference", "value")
_ALLOWED = {
    Kind.STALE: ("generator",),
    Kind.CORRUPT: _SCORERS,
    Kind.ERRORS: ("generator", *_SCORERS),
    Kind.SLOW: ("generator", *_SCORERS, "learner"),
}
"""Roles that apply versions; that have a mailbox; that finish work often enough for a rate of errors; whose work
has a size. Any role can have the other faults."""


@dataclass(frozen=True, slots=True)
class Roster:
    workers: tuple[str, ...]
    roles: tuple[str, ...]
    hosts: NDArray[np.int64]
    """[workers] the number of each worker's host"""

    def of_role(self, role: str) -> NDArray[np.int64]:
        """Return the indices of a role's workers."""
        return np.array([place for place, name in enumerate(self.roles) if name == role], dtype=np.int64)


def draw_roster(mix: Mapping[str, float], least: Mapping[str, int], size: int, rng: np.random.Generator) -> Roster:
    """Return ``size`` workers: each role has its share, but at least its least number, and the first role of
    ``mix`` has the rest. Neighbours share hosts of 1 to 8 workers, fewer in small fleets."""
    names = list(mix)
    counts = {name: max(least[name], round(mix[name] * size)) for name in names[1:]}
    counts[names[0]] = size - sum(counts.values())
    roles = tuple(name for name in names for _ in range(counts[name]))
    workers = tuple(f"{name}-{number}" for name in names for number in range(counts[name]))
    per_host = rng.integers(1, min(8, max(1, size // 8)) + 1, size=size)
    ends = np.cumsum(per_host)
    hosts = np.searchsorted(ends, np.arange(size), side="right")
    return Roster(workers, roles, hosts.astype(np.int64))


def draw_truth(case: Case, roster: Roster) -> Truth:
    rng = case.random("truth")
    if case.label in SINGLE:
        return Truth((_fault(case.label, float(rng.uniform(EARLIEST_S, LATEST_S)), roster, set(), rng),))
    if case.label == CONCURRENT:
        first = float(rng.uniform(EARLIEST_S, LATEST_S - MAX_APART_S))
        taken: set[str] = set()
        faults: list[Fault] = []
        for _ in range(int(rng.integers(2, 4)) if len(roster.workers) >= 16 else 2):
            label = SINGLE[rng.integers(len(SINGLE))]
            onset = first + float(rng.uniform(0.0, MAX_APART_S))
            faults.append(_fault(label, onset, roster, taken, rng))
            taken.add(faults[-1].worker)
        return Truth(tuple(faults))
    return Truth(control=next((control for control in Control if control.value == case.label), None))


def _fault(label: str, onset_s: float, roster: Roster, taken: set[str], rng: np.random.Generator) -> Fault:
    kind = Kind.SLOW if label in SLOW_BY else Kind(label)
    allowed = _ALLOWED.get(kind)
    places = [
        place
        for place, role in enumerate(roster.roles)
        if (allowed is None or role in allowed) and roster.workers[place] not in taken
    ]
    target = places[int(rng.integers(len(places)))]
    intensity, variant = _strength(kind, label, rng)
    return Fault(kind, roster.workers[target], onset_s, intensity, variant)


def _strength(kind: Kind, label: str, rng: np.random.Generator) -> tuple[float, str]:
    def between(low: float, high: float) -> float:
        """Draw log-uniformly."""
        return float(np.exp(rng.uniform(np.log(low), np.log(high))))

    match kind:
        case Kind.SLOW:
            return SLOW_BY[label], ""
        case Kind.LEAK:
            return between(5e6, 50e6), ""
        case Kind.ERRORS | Kind.CORRUPT:
            return float(rng.uniform(0.5, 1.0)), ""
        case Kind.DISK:
            return between(150.0, 540.0), ""
        case Kind.CLOCK:
            if rng.random() < 0.5:
                return 10.0 * float(rng.choice((-1.0, 1.0))), "drift"
            return between(400.0, 5000.0) * float(rng.choice((-1.0, 1.0))), "jump"
        case Kind.LINK:
            return between(8.0, 30.0), ""
        case Kind.HUNG:
            return 1.0, ("loop", "compute", "spin")[int(rng.integers(3))]
        case _:
            return 1.0, ""
