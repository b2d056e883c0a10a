"""How a new version of code comes to the workers of a run, and when it is rolled back. Pure.

    lazy ──a worker has it, or the limit──> canary ──its first work is good──> rolling
                                                                                  │ one after another
    (settled) <──rates are as before── watching <──all workers have it────────────┘

From each state but ``settled`` a failure leads to ``failed``. A worker that goes by the version
ends by an error, or does not come up in time. A loss is not finite, or the rate of updates falls by
a third. The way back is a rollout without canary: all workers at once, since theirs fails.

Its input is the workers as the supervisor sees them, updates, ends of workers, and the time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from statistics import median
from typing import Final

SLOWER: Final = 1.5
"""A median time between updates above so many of the former: the rate fell by a third."""


class RolloutState(StrEnum):
    """How far a version has come."""

    LAZY = "lazy"
    """Workers take it when they restart anyway."""
    CANARY = "canary"
    """One worker goes by it, and does its first work."""
    ROLLING = "rolling"
    WATCHING = "watching"
    """All workers go by it; updates are counted."""
    SETTLED = "settled"
    FAILED = "failed"
    """It is to be rolled back."""


@dataclass(frozen=True, slots=True)
class RolloutPolicy:
    """When a version is good, and how long each step may take, in seconds."""

    canary_pieces: int = 16
    canary_timeout_s: float = 60.0
    """A ready canary that was given less work in this time is good."""
    judged_updates: int = 8
    """On each side."""
    lazy_limit_s: float = 86_400.0
    replace_timeout_s: float = 600.0
    """From a drain to a ready successor."""
    watch_limit_s: float = 3600.0
    """A version is settled after this without enough updates."""


@dataclass(frozen=True, slots=True)
class CodedMember:
    """A worker that the version concerns, at one moment."""

    is_new: bool
    """Whether it goes by the version, as far as is known."""
    is_ready: bool = False
    """Whether it is past its start."""
    progress: int = 0
    """Pieces of work of this process."""


@dataclass(frozen=True, slots=True)
class UpdateGlance:
    """An update of the learner."""

    at_s: float
    """Its end, by the wall clock."""
    loss: float


class Rollout:
    """One version's way to the workers."""

    def __init__(
        self, limits: RolloutPolicy, *, now_s: float, made_s: float, is_lazy: bool = False, is_way_back: bool = False
    ) -> None:
        """``now_s``: by the monotonic clock, as all times but ``made_s`` and those of updates.
        ``made_s``: when the change was made, by the wall clock. ``is_way_back``: the version
        is a former one."""
        self._limits = limits
        self._is_way_back = is_way_back
        self._made_s = made_s
        self._since_s = now_s
        self.phase = RolloutState.LAZY if is_lazy and not is_way_back else RolloutState.CANARY
        self._is_lazy = self.phase is RolloutState.LAZY
        self.failure = ""
        """Why it is to be rolled back."""
        self.canary = ""
        self._ready_s: float | None = None
        """When the canary was first seen ready."""
        self._replaced: dict[str, float] = {}
        """Workers that are being replaced, with their deadlines."""
        self._complete_s: float | None = None
        """When all workers went by it, by the wall clock."""

    @property
    def is_over(self) -> bool:
        """Whether nothing follows."""
        return self.phase in (RolloutState.SETTLED, RolloutState.FAILED)

    def ended(self, worker: str, why: str) -> bool:
        """Note the bad end of a worker that goes by the version; return whether the version is to
        blame. A former version is not."""
        if self.phase is RolloutState.SETTLED or self._is_way_back:
            return False
        if self.phase is not RolloutState.FAILED:
            self._fail(f"{worker}, which went by it, {why}")
        return True

    def refused(self, why: str) -> None:
        """Note that no worker can be started with the version."""
        if not self.is_over:
            self._fail(why)

    def look(
        self, now_s: float, wall_s: float, workers: Mapping[str, CodedMember], updates: Sequence[UpdateGlance]
    ) -> list[str]:
        """Return the workers to replace now. ``updates``: the newest ones, oldest first."""
        if self.is_over:
            return []
        for name in [name for name, worker in workers.items() if worker.is_new and worker.is_ready]:
            self._replaced.pop(name, None)
        self._replaced = {name: due_s for name, due_s in self._replaced.items() if name in workers}
        late = [name for name, due_s in self._replaced.items() if now_s >= due_s]
        if late and not self._is_way_back:
            self._fail(f"{late[0]} did not go by it within {self._limits.replace_timeout_s:g} s")
            return []
        if self._is_way_back:
            return self._go_back(now_s, workers)
        orders: list[str] = []
        if self.phase is RolloutState.LAZY:
            self._wait(now_s, workers)
        if self.phase is RolloutState.CANARY:
            orders = self._try(now_s, workers)
        if self.phase is RolloutState.ROLLING:
            orders = self._roll(now_s, wall_s, workers)
        if self.phase is RolloutState.WATCHING:
            self._watch(wall_s, updates)
        return orders

    def _go_back(self, now_s: float, workers: Mapping[str, CodedMember]) -> list[str]:
        old = [name for name, worker in workers.items() if not worker.is_new and name not in self._replaced]
        if not old and not self._replaced:
            self.phase = RolloutState.SETTLED
        return self._replace(now_s, old)

    def _wait(self, now_s: float, workers: Mapping[str, CodedMember]) -> None:
        is_due = now_s - self._since_s >= self._limits.lazy_limit_s
        self._is_lazy = not is_due
        if is_due or any(worker.is_new for worker in workers.values()):
            self.phase = RolloutState.CANARY

    def _try(self, now_s: float, workers: Mapping[str, CodedMember]) -> list[str]:
        if self.canary not in workers:
            new = [name for name, worker in workers.items() if worker.is_new]
            self.canary, self._ready_s = (new or list(workers) or [""])[-1], None
        if not self.canary:
            return []
        canary = workers[self.canary]
        if not canary.is_new:
            return [] if self.canary in self._replaced else self._replace(now_s, [self.canary])
        if not canary.is_ready:
            self._await_start(now_s, [self.canary])
            return []
        if self._ready_s is None:
            self._ready_s = now_s
        if canary.progress >= self._limits.canary_pieces or now_s - self._ready_s >= self._limits.canary_timeout_s:
            self.phase = RolloutState.ROLLING
        return []

    def _roll(self, now_s: float, wall_s: float, workers: Mapping[str, CodedMember]) -> list[str]:
        self._is_lazy = self._is_lazy and now_s - self._since_s < self._limits.lazy_limit_s
        if all(worker.is_new and worker.is_ready for worker in workers.values()):
            self.phase, self._complete_s = RolloutState.WATCHING, wall_s
            return []
        old = [name for name, worker in workers.items() if not worker.is_new]
        self._await_start(now_s, [name for name, worker in workers.items() if worker.is_new and not worker.is_ready])
        return [] if self._is_lazy or self._replaced else self._replace(now_s, old[:1])

    def _await_start(self, now_s: float, names: Sequence[str]) -> None:
        for name in names:
            self._replaced.setdefault(name, now_s + self._limits.replace_timeout_s)

    def _replace(self, now_s: float, names: Sequence[str]) -> list[str]:
        self._replaced |= dict.fromkeys(names, now_s + self._limits.replace_timeout_s)
        return list(names)

    def _watch(self, wall_s: float, updates: Sequence[UpdateGlance]) -> None:
        complete_s = wall_s if self._complete_s is None else self._complete_s
        number = self._limits.judged_updates
        after = [update for update in updates if update.at_s >= complete_s]
        if bad := next((update for update in after if not math.isfinite(update.loss)), None):
            self._fail(f"a loss after it was not finite: {bad.loss:g}")
            return
        # one more than the times between them
        before = [update for update in updates if update.at_s < self._made_s][-number - 1 :]
        if len(after) > number:
            former_s, now_s = _interval_s(before), _interval_s(after[: number + 1])
            if former_s is not None and len(before) > number and now_s is not None and now_s > SLOWER * former_s:
                self._fail(
                    f"the rate of updates fell by a third or more: a median of {now_s:.3g} s between {number} updates "
                    f"after it, {former_s:.3g} s before"
                )
                return
            self.phase = RolloutState.SETTLED
        elif wall_s - complete_s >= self._limits.watch_limit_s:
            self.phase = RolloutState.SETTLED

    def _fail(self, why: str) -> None:
        self.phase, self.failure = RolloutState.FAILED, why


def _interval_s(updates: Sequence[UpdateGlance]) -> float | None:
    times = [later.at_s - earlier.at_s for earlier, later in pairwise(updates)]
    return median(times) if times else None
