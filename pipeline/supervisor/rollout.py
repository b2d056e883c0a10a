"""How a new version of code comes to the workers of a run, and when it is rolled back. Pure.

    lazy ──a worker has it, or the limit──> canary ──its first work is good──> rolling
                                                                                  │ one after another
    (settled) <──rates are as before── watching <──all workers have it────────────┘

From each state but ``settled`` a failure leads to ``failed``. A worker that runs the version
ends by an error, stands still, or does not come up. A loss is not finite. Or the rate of updates
falls by a third: the median time between ``judged_updates`` grows by half. Or fewer come than
``judged_updates`` and one more, in 1.5 times the longest time that so many took before. That time
has the run's evaluations and long responses in it, so that one more of them is no alarm. Time
counts only while nothing else holds the run up.

The way back is a rollout without canary: all workers at once, since theirs fails.

Its input is the workers as the supervisor sees them, updates, ends of workers, and the time. Of the
time between two evaluations at most ``MOST_BETWEEN_EVALUATIONS_S`` counts: none can be made while the ledger is
away, and no limit runs out meanwhile."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from statistics import median
from typing import Final

SLOWER: Final = 1.5
"""A time between updates above so many of the former: the rate fell by a third."""
MOST_BETWEEN_EVALUATIONS_S: Final = 2.0
_NUM_SPANS: Final = 10
"""So many times the judged updates before a version show how long they take at most."""
_MOST_TIMES: Final = 10
"""A time between two updates above so many medians was an outage, and counts as so many."""


class RolloutState(StrEnum):
    """How far a version has come."""

    LAZY = "lazy"
    """Workers take it when they restart anyway."""
    CANARY = "canary"
    """One worker runs it, and does its first work."""
    ROLLING = "rolling"
    WATCHING = "watching"
    """All workers run it; updates are counted."""
    SETTLED = "settled"
    FAILED = "failed"
    """It is to be rolled back."""


@dataclass(frozen=True, slots=True)
class RolloutPolicy:
    """When a version is good, and how long each step may take, in seconds."""

    canary_pieces: int = 16
    canary_timeout_s: float = 60.0
    """A ready canary that was given less work in this time, and holds none, is good."""
    judged_updates: int = 8
    """On each side."""
    lazy_limit_s: float = 86_400.0
    """Since the change was made."""
    replace_timeout_s: float = 360.0
    """Without a sign of life of a worker that is being replaced."""
    least_standstill_s: float = 60.0
    """No shorter time without enough updates is a failure."""
    watch_limit_s: float = 3600.0
    """A version is settled after this where too few updates before it are known."""


@dataclass(frozen=True, slots=True)
class CodedMember:
    """A worker that the version concerns, at one moment."""

    is_new: bool
    """Whether it runs the version, as far as is known."""
    is_ready: bool = False
    """Whether it is past its start."""
    progress: int = 0
    """Pieces of work of this process."""
    held: int = 0
    """Pieces of work that it has begun."""
    sign: object = None
    """Differs after each sign of life."""


@dataclass(slots=True)
class _Replacement:
    """The way of a worker to the version."""

    sign: object
    """Its last sign of life."""
    signed_s: float
    """When that was seen, in watched time."""


@dataclass(frozen=True, slots=True)
class UpdateSample:
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
        self._evaluated_s = now_s
        self._watched_s = 0.0
        """Time that counts, since the start."""
        self.phase = RolloutState.LAZY if is_lazy and not is_way_back else RolloutState.CANARY
        self._is_lazy = self.phase is RolloutState.LAZY
        self.failure = ""
        """Why it is to be rolled back."""
        self.canary = ""
        self._ready_s: float | None = None
        """When the canary was first seen ready, in watched time."""
        self._replaced: dict[str, _Replacement] = {}
        """Workers that are being replaced."""
        self._begun_s: float | None = None
        """When the first worker ran it, by the wall clock."""
        self._complete_s: float | None = None
        """When all workers ran it, by the wall clock."""
        self._free_s = 0.0
        """Time since then in which nothing else held the run up."""

    @property
    def is_over(self) -> bool:
        """Whether nothing follows."""
        return self.phase in (RolloutState.SETTLED, RolloutState.FAILED)

    def ended(self, worker: str, why: str) -> bool:
        """Record the bad end of a worker that runs the version; return whether the version is to
        blame. A former version is not."""
        if self.phase is RolloutState.SETTLED or self._is_way_back:
            return False
        if self.phase is not RolloutState.FAILED:
            self._fail(f"{worker}, which used it, {why}")
        return True

    def refused(self, why: str) -> None:
        """Record that no worker can be started with the version."""
        if not self.is_over:
            self._fail(why)

    def evaluate(
        self,
        now_s: float,
        wall_s: float,
        workers: Mapping[str, CodedMember],
        updates: Sequence[UpdateSample],
        *,
        is_held_up: bool = False,
    ) -> list[str]:
        """Return the workers to replace now.

        Args:
            now_s: By the monotonic clock.
            wall_s: By the wall clock.
            workers: Those that the version concerns.
            updates: The newest ones, oldest first.
            is_held_up: Whether something else may hold updates up, as a pause or a start."""
        passed_s = min(now_s - self._evaluated_s, MOST_BETWEEN_EVALUATIONS_S)
        self._evaluated_s, self._watched_s = now_s, self._watched_s + passed_s
        if self.is_over:
            return []
        self._see(wall_s, workers)
        if self._is_way_back:
            return self._go_back(workers)
        if not self._check(updates):
            return []
        orders: list[str] = []
        if self.phase is RolloutState.LAZY:
            self._wait(wall_s, workers)
        if self.phase is RolloutState.CANARY:
            orders = self._try(workers)
        if self.phase is RolloutState.ROLLING:
            orders = self._roll(wall_s, workers)
        if self.phase is RolloutState.WATCHING:
            self._free_s += 0.0 if is_held_up else passed_s
            self._watch(wall_s, updates)
        return orders

    def _see(self, wall_s: float, workers: Mapping[str, CodedMember]) -> None:
        """Record the workers that run the version, and signs of life of those being replaced."""
        done = [name for name, worker in workers.items() if worker.is_new and worker.is_ready]
        if done and self._begun_s is None:
            self._begun_s = wall_s
        for name in [name for name in self._replaced if name in done or name not in workers]:
            del self._replaced[name]
        for name, replacement in self._replaced.items():
            if workers[name].sign != replacement.sign:
                replacement.sign, replacement.signed_s = workers[name].sign, self._watched_s

    def _check(self, updates: Sequence[UpdateSample]) -> bool:
        """Return whether no loss and no worker on its way speaks against the version."""
        limit_s = self._limits.replace_timeout_s
        late = [name for name, one in self._replaced.items() if self._watched_s - one.signed_s >= limit_s]
        if late:
            self._fail(f"{late[0]} did not go by it: there was no sign of it for {limit_s:g} s")
            return False
        made = [] if self._begun_s is None else [one for one in updates if one.at_s >= self._begun_s]
        if bad := next((update for update in made if not math.isfinite(update.loss)), None):
            self._fail(f"a loss after it was not finite: {bad.loss:g}")
            return False
        return True

    def _go_back(self, workers: Mapping[str, CodedMember]) -> list[str]:
        old = [name for name, worker in workers.items() if not worker.is_new and name not in self._replaced]
        if not old and not self._replaced:
            self.phase = RolloutState.SETTLED
        return self._replace(old, workers)

    def _wait(self, wall_s: float, workers: Mapping[str, CodedMember]) -> None:
        self._is_lazy = wall_s - self._made_s < self._limits.lazy_limit_s
        if not self._is_lazy or any(worker.is_new for worker in workers.values()):
            self.phase = RolloutState.CANARY

    def _try(self, workers: Mapping[str, CodedMember]) -> list[str]:
        if self.canary not in workers:
            new = [name for name, worker in workers.items() if worker.is_new]
            self.canary, self._ready_s = (new or list(workers) or [""])[-1], None
        if not self.canary:
            return []
        canary = workers[self.canary]
        if not canary.is_new:
            return self._replace([self.canary], workers)
        if not canary.is_ready:
            self._await_start([self.canary], workers)
            return []
        if self._ready_s is None:
            self._ready_s = self._watched_s
        is_idle = not canary.held and self._watched_s - self._ready_s >= self._limits.canary_timeout_s
        if is_idle or canary.progress >= self._limits.canary_pieces:
            self.phase = RolloutState.ROLLING
        return []

    def _roll(self, wall_s: float, workers: Mapping[str, CodedMember]) -> list[str]:
        self._is_lazy = self._is_lazy and wall_s - self._made_s < self._limits.lazy_limit_s
        if all(worker.is_new and worker.is_ready for worker in workers.values()):
            self.phase, self._complete_s = RolloutState.WATCHING, wall_s
            return []
        old = [name for name, worker in workers.items() if not worker.is_new]
        self._await_start([name for name, worker in workers.items() if worker.is_new and not worker.is_ready], workers)
        return [] if self._is_lazy or self._replaced else self._replace(old[:1], workers)

    def _await_start(self, names: Sequence[str], workers: Mapping[str, CodedMember]) -> None:
        for name in names:
            self._replaced.setdefault(name, _Replacement(workers[name].sign, self._watched_s))

    def _replace(self, names: Sequence[str], workers: Mapping[str, CodedMember]) -> list[str]:
        """Return those of ``names`` that are not being replaced, as from now on they are."""
        new = [name for name in names if name not in self._replaced]
        self._await_start(new, workers)
        return new

    def _watch(self, wall_s: float, updates: Sequence[UpdateSample]) -> None:
        complete_s = wall_s if self._complete_s is None else self._complete_s
        number = self._limits.judged_updates
        before = [update for update in updates if update.at_s < self._made_s]
        after = [update for update in updates if update.at_s >= complete_s]
        longest_s = _longest_s(before[-_NUM_SPANS * (number + 1) :], number + 1)
        if len(after) > number:
            # one more than the times between them
            former, now_s = _times_s(before[-number - 1 :]), median(_times_s(after[: number + 1]))
            if len(former) < number or now_s <= SLOWER * median(former):
                self.phase = RolloutState.SETTLED
                return
            self._fail(
                f"the rate of updates fell by a third or more: a median of {now_s:.3g} s between {number} updates "
                f"after it, {median(former):.3g} s before"
            )
        elif longest_s is None:
            if self._free_s >= self._limits.watch_limit_s:
                self.phase = RolloutState.SETTLED
        elif self._free_s > max(SLOWER * longest_s, self._limits.least_standstill_s):
            self._fail(
                f"the rate of updates fell by a third or more: {len(after)} of {number + 1} in {self._free_s:.3g} s after "
                f"it; before, so many took {longest_s:.3g} s at most"
            )

    def _fail(self, why: str) -> None:
        self.phase, self.failure = RolloutState.FAILED, why


def _times_s(updates: Sequence[UpdateSample]) -> list[float]:
    return [later.at_s - earlier.at_s for earlier, later in pairwise(updates)]


def _longest_s(updates: Sequence[UpdateSample], number: int) -> float | None:
    """Return the longest time that ``number`` updates in a row took; None for fewer."""
    times = _times_s(updates)
    if len(times) < number:
        return None
    most_s = _MOST_TIMES * median(times)
    return max(sum(min(time_s, most_s) for time_s in times[at : at + number]) for at in range(len(times) - number + 1))
