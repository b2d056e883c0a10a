"""Dual-phase replay: finds faulty workers among many by checks of whole groups. Pure.

Worker number x of K = m * n is in group ``x div m`` of the first phase, of m neighbours, and in
group ``x mod n`` of the second. A faulty worker makes both its groups fail. With m <= n neighbours
have different remainders. So one failing group of each phase share one worker. f faulty workers
leave at most f * f suspects. Where these are more than ``MOST_SUSPECTS``, a third grouping divides
them. A fault that comes and goes needs rounds: a group has failed if it did in one.

A check of a group helps where its members compute together, as ranks do. A worker that answers for
itself needs no groups: its own answer is the check.

Source: ByteRobust (SOSP'25), section on dual-phase replay."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import isqrt
from typing import Final

MOST_SUSPECTS: Final = 4
"""So many suspects are given up together; among more a third grouping decides."""
ROUNDS: Final = 2
_PHASES: Final = 3


@dataclass(frozen=True, slots=True)
class Grid:
    """K places for workers: ``num_groups`` groups of ``group_size`` neighbours."""

    group_size: int
    """m"""
    num_groups: int
    """n"""

    @classmethod
    def of(cls, num_workers: int) -> Grid:
        """Return the squarest grid with m <= n that has room. Raises ValueError without workers."""
        if num_workers < 1:
            raise ValueError(f"{num_workers} workers; expected at least 1")
        size = isqrt(num_workers)
        return cls(size, -(-num_workers // size))

    @property
    def is_unique(self) -> bool:
        """Whether a single faulty worker is always found alone."""
        return self.group_size <= self.num_groups

    def group_of(self, worker: int, phase: int) -> int:
        """Return a worker's group in phase 1, 2 or 3."""
        first, second = worker // self.group_size, worker % self.num_groups
        return (first, second, (first + second) % self.num_groups)[phase - 1]

    def groups(self, num_workers: int, phase: int) -> tuple[tuple[int, ...], ...]:
        """Return the workers of each group that has any, by its number."""
        found: dict[int, list[int]] = {}
        for worker in range(num_workers):
            found.setdefault(self.group_of(worker, phase), []).append(worker)
        return tuple(tuple(found[group]) for group in sorted(found))


class FaultFinder:
    """One search: it names the groups to check next, and takes which of them failed."""

    def __init__(self, workers: Sequence[str], *, rounds: int = ROUNDS, grid: Grid | None = None) -> None:
        """Search among ``workers``, in ``rounds`` checks of each grouping. Raises ValueError: no
        worker, no round, or a grid without room."""
        self._workers = tuple(workers)
        self._grid = grid or Grid.of(len(self._workers))
        if rounds < 1 or self._grid.group_size * self._grid.num_groups < len(self._workers):
            raise ValueError(
                f"{rounds} rounds of {len(self._workers)} workers on {self._grid}; expected room and a round"
            )
        self._rounds = rounds
        self._phase, self._round = 1, 1
        self._suspects = frozenset(range(len(self._workers)))
        self._failing: set[int] = set()
        """Numbers of the workers in groups that failed in this phase."""
        self.num_checks = 0
        """Checks of groups so far."""

    @property
    def suspects(self) -> tuple[str, ...]:
        """The workers that are in a failing group of each phase so far."""
        return tuple(self._workers[at] for at in sorted(self._suspects))

    @property
    def groups(self) -> tuple[tuple[str, ...], ...]:
        """The groups to check now; none at the end of the search."""
        if self._phase > _PHASES:
            return ()
        numbers = self._grid.groups(len(self._workers), self._phase)
        return tuple(tuple(self._workers[at] for at in group) for group in numbers)

    def note(self, failing: Collection[int]) -> None:
        """Take a round's result: the places in ``groups`` of those that failed. Raises ValueError
        at the end of the search."""
        if self._phase > _PHASES:
            raise ValueError("the search has ended; read its suspects")
        groups = self._grid.groups(len(self._workers), self._phase)
        self.num_checks += len(groups)
        self._failing.update(worker for place in failing for worker in groups[place])
        if self._round < self._rounds:
            self._round += 1
            return
        self._suspects &= self._failing
        self._failing = set()
        is_enough = not self._suspects or (self._phase == 2 and len(self._suspects) <= MOST_SUSPECTS)
        self._phase, self._round = (_PHASES + 1 if is_enough else self._phase + 1), 1
