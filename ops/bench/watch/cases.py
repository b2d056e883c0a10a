"""The windows of the benchmark: which fleet, what goes wrong in it, and its seed.

Development and test cases have different seeds by construction: the split is part of the seed's entropy."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

WINDOW_S = 900
"""Length of a window: 15 minutes at 1 Hz."""
EXPLICIT_S, GRAY_S = 10.0, 240.0
"""Longest time from onset to a right alarm, for explicit and for gray faults."""


class Kind(StrEnum):
    KILLED = "killed"
    HUNG = "hung"
    SLOW = "slow"
    LEAK = "leak"
    ERRORS = "errors"
    CORRUPT = "corrupt"
    STALE = "stale"
    DISK = "disk"
    CLOCK = "clock"
    LINK = "link"


EXPLICIT = frozenset({Kind.KILLED, Kind.HUNG, Kind.ERRORS, Kind.CORRUPT})
"""Faults that must be named within ``EXPLICIT_S``."""


class Control(StrEnum):
    """A negative control: unusual, and not the fault of any worker."""

    LONG_TAIL = "N1 long-tail prompts"
    WEIGHT_SYNC = "N2 weight-sync pause"
    GC = "N3 collection of 2 s"
    REDIS = "N4 latency of all of Redis"
    LOAD = "N5 load x2"
    EVALUATION = "N6 evaluation phase"
    SCALE = "N7 scale-up and scale-down"
    TOOL = "N8 slow tool"


SINGLE: tuple[str, ...] = (
    "killed", "hung", "slow x1.5", "slow x2", "slow x4", "slow x8", "leak", "errors", "corrupt", "stale", "disk",
    "clock", "link",
)  # fmt: skip
"""Labels of windows with one fault."""
SLOW_BY = {"slow x1.5": 1.5, "slow x2": 2.0, "slow x4": 4.0, "slow x8": 8.0}
BENIGN = "benign"
CONCURRENT = "concurrent"
"""Label of windows with two or three faults."""
SPLITS = ("dev", "test")


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault of one component."""

    kind: Kind
    worker: str
    onset_s: float
    """Seconds since the window began."""
    intensity: float
    """Factor of the time of work (slow) or of latency (link); bytes a second (leak); share (errors, corrupt);
    seconds to a full disk (disk); milliseconds (clock)."""
    variant: str = ""
    """Hung: ``loop``, ``compute`` or ``spin``. Clock: ``jump`` or ``drift``."""

    @property
    def limit_s(self) -> float:
        """Longest time from onset to a right alarm."""
        return EXPLICIT_S if self.kind in EXPLICIT else GRAY_S


@dataclass(frozen=True, slots=True)
class Truth:
    """What the generator knows of a window. No detector reads it."""

    faults: tuple[Fault, ...] = ()
    control: Control | None = None


@dataclass(frozen=True, slots=True)
class Case:
    """The name of one window, from which it is generated."""

    split: str
    size: int
    label: str
    """One of ``SINGLE``, ``concurrent``, ``benign``, or a control's name."""
    index: int
    """Number among the windows of this split, size and label."""

    @property
    def is_benign(self) -> bool:
        """Whether any alarm is false."""
        return self.label == BENIGN or self.label in {control.value for control in Control}

    def random(self, purpose: str) -> np.random.Generator:
        """Return the random stream for one purpose of this window."""
        name = f"{self.split}|regimes|{self.size}|{self.label}|{self.index}|{purpose}"
        return np.random.default_rng(int.from_bytes(hashlib.sha256(name.encode()).digest()[:16], "big"))


def cases(
    split: str, size: int, *, single: int, concurrent: int, benign: int, controls: int, first: int = 0
) -> Iterator[Case]:
    """Yield this many windows of each sort. ``first`` is the number of the first window of each label; windows
    with other numbers have other seeds."""
    for label, number in _shares(single, concurrent, benign, controls):
        yield from (Case(split, size, label, index) for index in range(first, first + number))


def _shares(single: int, concurrent: int, benign: int, controls: int) -> Iterator[tuple[str, int]]:
    for names, total in (
        (SINGLE, single),
        ((CONCURRENT,), concurrent),
        ((BENIGN,), benign),
        (tuple(control.value for control in Control), controls),
    ):
        for place, name in enumerate(names):
            yield name, total // len(names) + (place < total % len(names))
