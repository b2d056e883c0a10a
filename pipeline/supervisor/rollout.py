"""How a new version of code reaches a run's workers, and when it is rolled back. Pure.

    lazy ──a worker has it, or the limit──> canary ──its first work is good──> rolling
                                                                                  │ one after another
    (settled) <──rates are as before── watching <──all workers have it────────────┘

Each state but ``settled`` leads to ``failed`` if

- a worker that runs the version ends with an error, hangs, or does not start;
- a loss is not finite;
- the rate of updates falls by a third: the median time between ``judged_updates`` updates grows by
  half, or fewer than ``judged_updates + 1`` arrive in 1.5 times the longest time that so many took
  before. That longest time includes the run's evaluations and long responses, so another of these
  raises no alarm. Only time in which nothing else delays the run counts.

A rollback is a rollout without canary: all workers are replaced at once, since theirs fails.

Its input is the workers as the supervisor sees them, updates, exits, and the time. Between two
evaluations at most ``MOST_BETWEEN_EVALUATIONS_S`` counts: none happen while the ledger is away, and
no limit expires meanwhile."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from statistics import median
from typing import Final

from pipeline.config.operations import CodeSection

SLOWER: Final = 1.5
"""Times between updates above this ratio mean that the rate fell by a third."""
MOST_BETWEEN_EVALUATIONS_S: Final = 2.0
WATCH_LIMIT_S: Final = 3600.0
"""Settle the version after this time if too few earlier updates are known to compare with."""
_NUM_SPANS: Final = 10
"""How far back to look for the longest time, as a multiple of the judged updates."""
_MOST_TIMES: Final = 10
"""A gap of more than this many medians was an outage, and counts as this many."""


class RolloutState(StrEnum):
    LAZY = "lazy"
    """Workers get the version when they restart anyway."""
    CANARY = "canary"
    """One worker runs it and does its first work."""
    ROLLING = "rolling"
    WATCHING = "watching"
    """All workers run it; updates are counted."""
    SETTLED = "settled"
    FAILED = "failed"
    """To be rolled back."""


@dataclass(frozen=True, slots=True)
class CodedMember:
    """The state of one worker that the version concerns."""

    is_new: bool
    """Whether it runs the version, as far as known."""
    is_ready: bool = False
    """Whether it has finished starting."""
    progress: int = 0
    """Pieces of work finished by this process."""
    held: int = 0
    """Pieces of work begun but not finished."""
    sign: object = None
    """A value that changes with each sign of life."""


@dataclass(slots=True)
class _Replacement:
    sign: object
    signed_s: float
    """When ``sign`` last changed, in watched time."""


@dataclass(frozen=True, slots=True)
class UpdateSample:
    at_s: float
    """When it ended, wall clock."""
    loss: float


class Rollout:
    def __init__(
        self,
        limits: CodeSection,
        *,
        restart_timeout_s: float,
        standstill_s: float,
        now_s: float,
        made_s: float,
        is_lazy: bool = False,
        is_way_back: bool = False,
    ) -> None:
        """Args:
        limits: When a version is good.
        restart_timeout_s: Longest time without a sign of life from a worker that is being replaced.
        standstill_s: A shorter time without enough updates is never a failure.
        now_s: Monotonic, as all times except ``made_s`` and those of updates.
        made_s: When the change was made, wall clock.
        is_lazy: Whether workers get it when they restart anyway.
        is_way_back: Whether this is a rollback."""
        self._limits, self._restart_timeout_s, self._standstill_s = limits, restart_timeout_s, standstill_s
        self._is_way_back = is_way_back
        self._made_s = made_s
        self._evaluated_s = now_s
        self._watched_s = 0.0
        """Time that counts, since the start."""
        self.phase = RolloutState.LAZY if is_lazy and not is_way_back else RolloutState.CANARY
        self._is_lazy = self.phase is RolloutState.LAZY
        self.failure = ""
        """Why it must be rolled back."""
        self.canary = ""
        self._ready_s: float | None = None
        """When the canary was first ready, in watched time."""
        self._replaced: dict[str, _Replacement] = {}
        """Workers being replaced."""
        self._begun_s: float | None = None
        """When the first worker ran it, wall clock."""
        self._complete_s: float | None = None
        """When all workers ran it, wall clock."""
        self._free_s = 0.0
        """Time since then in which nothing else delayed the run."""

    @property
    def is_over(self) -> bool:
        return self.phase in (RolloutState.SETTLED, RolloutState.FAILED)

    def ended(self, worker: str, why: str) -> bool:
        """Record that a worker running the version failed; return whether the version is to blame.
        A rollback's version never is."""
        if self.phase is RolloutState.SETTLED or self._is_way_back:
            return False
        if self.phase is not RolloutState.FAILED:
            self._fail(f"{worker}, which used it, {why}")
        return True

    def refused(self, why: str) -> None:
        """Fail the version, since no worker can be started with it."""
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
        """Advance the rollout; return the workers to replace now.

        Args:
            now_s: Monotonic.
            wall_s: Wall clock.
            workers: Those that the version concerns.
            updates: The newest updates, oldest first.
            is_held_up: Whether something else may delay updates, such as a pause or a start."""
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
        """Note which workers run the version, and signs of life of those being replaced."""
        done = [name for name, worker in workers.items() if worker.is_new and worker.is_ready]
        if done and self._begun_s is None:
            self._begun_s = wall_s
        for name in [name for name in self._replaced if name in done or name not in workers]:
            del self._replaced[name]
        for name, replacement in self._replaced.items():
            if workers[name].sign != replacement.sign:
                replacement.sign, replacement.signed_s = workers[name].sign, self._watched_s

    def _check(self, updates: Sequence[UpdateSample]) -> bool:
        """Fail the version if a loss is not finite or a worker does not come up; return whether it
        is good so far."""
        limit_s = self._restart_timeout_s
        late = [name for name, one in self._replaced.items() if self._watched_s - one.signed_s >= limit_s]
        if late:
            self._fail(f"{late[0]} did not start with it: there was no sign of life for {limit_s:g} s")
            return False
        made = [] if self._begun_s is None else [one for one in updates if one.at_s >= self._begun_s]
        if bad := next((update for update in made if not math.isfinite(update.loss)), None):
            self._fail(f"a loss after its rollout was not finite: {bad.loss:g}")
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
        """Mark workers as being replaced; return those that were not yet."""
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
            # n + 1 updates have n times between them
            former, now_s = _times_s(before[-number - 1 :]), median(_times_s(after[: number + 1]))
            if len(former) < number or now_s <= SLOWER * median(former):
                self.phase = RolloutState.SETTLED
                return
            self._fail(
                f"the rate of updates fell by a third or more: a median of {now_s:.3g} s between {number} updates "
                f"after it, {median(former):.3g} s before"
            )
        elif longest_s is None:
            if self._free_s >= WATCH_LIMIT_S:
                self.phase = RolloutState.SETTLED
        elif self._free_s > max(SLOWER * longest_s, self._standstill_s):
            self._fail(
                f"the rate of updates fell by a third or more: {len(after)} of {number + 1} in {self._free_s:.3g} s after "
                f"it; before, this many took at most {longest_s:.3g} s"
            )

    def _fail(self, why: str) -> None:
        self.phase, self.failure = RolloutState.FAILED, why


def _times_s(updates: Sequence[UpdateSample]) -> list[float]:
    return [later.at_s - earlier.at_s for earlier, later in pairwise(updates)]


def _longest_s(updates: Sequence[UpdateSample], number: int) -> float | None:
    """Return the longest time that ``number`` updates in a row took; None if there are fewer."""
    times = _times_s(updates)
    if len(times) < number:
        return None
    most_s = _MOST_TIMES * median(times)
    return max(sum(min(time_s, most_s) for time_s in times[at : at + number]) for at in range(len(times) - number + 1))
