"""Detectors over windows: every detector sees the same frames, and nothing else."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

import numpy as np

from ops.bench.watch.baselines import Detector, WatchDetector
from ops.bench.watch.cases import FLEETS, Case
from ops.bench.watch.contenders import Make
from ops.bench.watch.fleets import open_fleet
from ops.bench.watch.scoring import Alarm, Outcome, is_decided, judge
from pipeline.watch.frame import Frame

TICK_METRICS: Final = (
    "heartbeat_age_s", "progress", "done", "in_flight", "oldest_age_s", "loop_lag_ms", "cpu", "rss_bytes",
    "tokens_per_s", "service_ratio", "errors", "version_lag", "ledger_rtt_ms",
)  # fmt: skip
"""The 13 metrics of the measurement of a tick's cost."""


def run_case(case: Case, makes: Mapping[str, Make]) -> tuple[dict[str, Outcome], dict[str, float]]:
    """Return each detector's outcome in a window, and its highest level."""
    fleet = open_fleet(case)
    detectors: dict[str, Detector] = {name: make() for name, make in makes.items()}
    alarms: dict[str, list[Alarm]] = {name: [] for name in makes}
    ended_s: dict[str, float] = {}
    second = 0
    for second, frame in enumerate(fleet.frames()):
        now = float(second)
        for name, detector in detectors.items():
            if name not in ended_s:
                alarms[name] += detector.tick(frame, now)
                if is_decided(fleet.truth, alarms[name], now):
                    ended_s[name] = now + 1.0
        if len(ended_s) == len(detectors):
            break
    return (
        {name: judge(case, fleet.truth, alarms[name], ended_s.get(name, second + 1.0)) for name in makes},
        {name: detector.highest for name, detector in detectors.items()},
    )


def run_cases(
    given: Sequence[Case],
    makes: Mapping[str, Make],
    *,
    max_s: float = math.inf,
    shown: Callable[[Case, dict[str, Outcome], int], None] = lambda *_: None,
    clock: Callable[[], float] = time.monotonic,
) -> dict[str, list[Outcome]]:
    """Return the outcomes by detector. After ``max_s`` no window is begun. The order of the windows
    was chosen before, so what is left out does not depend on outcomes."""
    outcomes: dict[str, list[Outcome]] = {name: [] for name in makes}
    end_s = clock() + max_s
    for number, case in enumerate(given, 1):
        if clock() > end_s:
            break
        found, _ = run_case(case, makes)
        for name, outcome in found.items():
            outcomes[name].append(outcome)
        shown(case, found, number)
    return outcomes


def highest_levels(given: Iterable[Case], makes: Mapping[str, Make]) -> dict[str, list[float]]:
    """Return each detector's highest level in each window."""
    levels: dict[str, list[float]] = {name: [] for name in makes}
    for case in given:
        for name, level in run_case(case, makes)[1].items():
            levels[name].append(level)
    return levels


def tick_costs(size: int = 10_000, warm_up: int = 60, ticks: int = 200) -> dict[str, float]:
    """Return milliseconds of processor time of one tick of the watch: P50, P99 and the mean."""
    detector = WatchDetector()
    costs: list[float] = []
    for tick, frame in enumerate(open_fleet(Case("dev", FLEETS[0], size, "benign", 0)).frames()):
        if tick == warm_up + ticks:
            break
        columns = [frame.metrics.index(name) for name in TICK_METRICS]
        narrow = Frame(
            frame.time_s, frame.workers, frame.roles, TICK_METRICS, np.ascontiguousarray(frame.values[:, columns])
        )
        began = time.thread_time()
        detector.tick(narrow, float(tick))
        if tick >= warm_up:
            costs.append(1000.0 * (time.thread_time() - began))
    return {
        "workers": size,
        "metrics": len(TICK_METRICS),
        "ticks": len(costs),
        "p50_ms": float(np.percentile(costs, 50)),
        "p99_ms": float(np.percentile(costs, 99)),
        "mean_ms": float(np.mean(costs)),
        "max_ms": float(np.max(costs)),
    }
