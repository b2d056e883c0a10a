"""The rows of the comparison: detectors by name, with their frozen thresholds."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Final

from ops.bench.watch.baselines import (
    Detector,
    DistanceDetector,
    HeartbeatDetector,
    MahalanobisDetector,
    TimeoutDetector,
    WatchDetector,
)
from ops.bench.watch.cases import FLEETS, Case
from ops.bench.watch.fleets import open_fleet
from ops.bench.watch.roster import LATEST_S
from ops.bench.watch.scoring import Alarm
from protocol.errors import ConfigError

THRESHOLDS: Final = Path(__file__).parent / "thresholds.json"
"""By detector and size; ``headrace bench watch --calibrate`` writes it."""
MOST_BLAMED: Final = 0.02
"""Share of benign development windows in which a baseline may alarm."""
NAMES: Final = ("watch", "heartbeat", "timeouts", "distance", "mahalanobis", "lstm-vae")
TUNED: Final = ("heartbeat", "distance", "mahalanobis", "lstm-vae")
"""Detectors with a threshold."""

Make = Callable[[], Detector]


def make_all(names: Iterable[str], size: int, thresholds: Mapping[str, Mapping[str, float]] | None) -> dict[str, Make]:
    """Return what makes a new detector for one window of that many workers. Without thresholds they
    are infinite: levels are then measured, and nothing is named."""

    def limit(name: str) -> float:
        if thresholds is None:
            return math.inf
        known = thresholds.get(name, {})
        if not known:
            raise ConfigError(f"no threshold of {name}; run headrace bench watch --calibrate first")
        return known[min(known, key=lambda other: abs(math.log(int(other) / size)))]

    makes: dict[str, Make] = {}
    for name in names:
        match name:
            case "watch":
                makes[name] = WatchDetector
            case "heartbeat":
                makes[name] = partial(HeartbeatDetector, limit(name))
            case "timeouts":
                makes[name] = TimeoutDetector
            case "distance":
                makes[name] = partial(DistanceDetector, limit(name))
            case "mahalanobis":
                makes[name] = partial(MahalanobisDetector, limit(name))
            case "lstm-vae":
                makes[name] = _vae(limit(name))
            case _:
                raise ConfigError(f"no detector is called {name}; there are {', '.join(NAMES)}")
    return makes


_trained: list[object] = []


def _vae(threshold: float) -> Make:
    # torch takes seconds to import, and the models a minute to train: only for this detector
    from ops.bench.watch.vae import METRICS, Denoise, train

    if not _trained:
        _trained.append(Denoise(train()[0]))
    denoise = _trained[0]
    assert isinstance(denoise, Denoise)
    return partial(DistanceDetector, threshold, METRICS, denoise)


def read_thresholds() -> dict[str, dict[str, float]]:
    """Return the frozen thresholds by detector and size."""
    return json.loads(THRESHOLDS.read_text(encoding="utf-8"))


def threshold(highest: list[float]) -> float:
    """Return the lowest level that at most ``MOST_BLAMED`` of these windows exceed."""
    ordered = sorted(highest)
    return ordered[len(ordered) - 1 - int(MOST_BLAMED * len(ordered))]


def check_distinct(makes: Mapping[str, Make], size: int = 16) -> None:
    """Raise ``ConfigError`` when two detectors do the same on two probes: a worker that is killed,
    and one that is slow."""
    if len(makes) < 2:
        return
    alarms: dict[str, list[Alarm]] = {name: [] for name in makes}
    levels: dict[str, list[float]] = {name: [] for name in makes}
    for label in ("killed", "slow x8"):
        frames = list(islice(open_fleet(Case("dev", FLEETS[0], size, label, 999)).frames(), int(LATEST_S) + 120))
        for name, make in makes.items():
            detector = make()
            alarms[name] += [alarm for now, frame in enumerate(frames) for alarm in detector.tick(frame, float(now))]
            levels[name].append(detector.highest)
    for one, other in itertools.combinations(makes, 2):
        if alarms[one] == alarms[other] and levels[one] == levels[other]:
            raise ConfigError(f"{one} and {other} named the same workers at the same times; one of the rows is no row")


def check_windows_distinct(given: Iterable[Case]) -> None:
    """Raise ``ConfigError`` when two windows begin alike, the same windows of the other split
    included."""
    seen: dict[bytes, Case] = {}
    for case in given:
        for split in ("dev", "test"):
            other = replace(case, split=split)
            print_of = next(iter(open_fleet(other).frames())).values.tobytes()
            if seen.setdefault(print_of, other) != other:
                raise ConfigError(f"{other} begins as {seen[print_of]} does; windows need seeds of their own")
