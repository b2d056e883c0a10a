"""Small fleets for tests of the watch: frames of healthy workers, with oddities put in by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from pipeline.fleet.peers.frame import Finding, Frame
from pipeline.fleet.peers.watcher import Watch

Change = Callable[[float, np.ndarray], None]
"""Gets the time and the values [workers, metrics], and changes them."""

LEVELS: Mapping[str, float] = {"cpu": 0.6, "tokens_per_s": 2000.0, "service_ratio": 1.0, "heat": 40.0}


def names(num: int, role: str = "generator") -> tuple[str, ...]:
    """Return the names of a role's workers."""
    return tuple(f"{role}-{at}" for at in range(num))


def fleet(
    num: int = 8,
    *,
    seconds: int = 300,
    step_s: float = 1.0,
    levels: Mapping[str, float] = LEVELS,
    change: Change | None = None,
    seed: int = 0,
    roles: Sequence[str] | None = None,
    noise: float = 0.05,
) -> Iterator[Frame]:
    """Yield frames of workers with 5 % of noise around the levels; 0 is exact."""
    random = np.random.default_rng(seed)
    workers, metrics = names(num), tuple(levels)
    usual = np.array(list(levels.values()))
    hosts = 1.0 + noise * random.standard_normal((num, len(metrics)))
    for at in range(int(seconds / step_s)):
        values = usual * hosts * (1.0 + noise * random.standard_normal((num, len(metrics))))
        if change is not None:
            change(at * step_s, values)
        yield Frame(at * step_s, workers, tuple(roles or ["generator"] * num), metrics, values.astype(np.float32))


def findings(frames: Iterator[Frame], watch: Watch | None = None) -> list[Finding]:
    """Return all findings of a fresh watch."""
    watch = watch or Watch()
    return [one for frame in frames for one in watch.tick(frame)]


def named(frames: Iterator[Frame]) -> list[tuple[str, str]]:
    """Return worker and kind of all findings."""
    return [(one.worker, one.kind) for one in findings(frames)]
