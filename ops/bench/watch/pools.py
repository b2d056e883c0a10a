"""The workers of one role of the second fleet: queues, slots, and items that are worked on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Counts = NDArray[np.int64]
Draw = Callable[[Counts], tuple[Array, Array, Array]]
"""Of the workers that begin an item, one entry an item: its work in seconds at usual speed, the
expected seconds, and its tokens."""

_PASSES: Final = 5
"""Items that one slot can begin within a second."""
_ROOM: Final = 32
"""Items that a mailbox holds."""


class Pool:
    """The workers of a role. An item has a slot from its begin to its end; work is in seconds of a
    worker of usual speed."""

    def __init__(self, number: int, slots: int) -> None:
        shape = (number, slots)
        self.number, self.slots = number, slots
        self.left = np.zeros(shape)
        """Work still to do, by slot; 0: the slot is free."""
        self.begun_s, self.expected_s, self.tokens = np.zeros(shape), np.zeros(shape), np.zeros(shape)
        self.queue = np.zeros(number, dtype=np.int64)
        self.ended = np.zeros(number, dtype=np.int64)
        """Items that ended in the last second, failed ones included."""
        self.ended_tokens, self.moved_tokens = np.zeros(number), np.zeros(number)
        self.took_s, self.should_take_s = np.zeros(number), np.zeros(number)
        """Of the items that ended in the last second."""
        self.busy = np.zeros(number)
        """Share of all slots' time that was worked, in the last second."""

    @property
    def in_flight(self) -> Counts:
        """Return the items in slots, by worker."""
        return (self.left > 0.0).sum(axis=1)

    def oldest_age_s(self, now: float) -> Array:
        """Return the age of each worker's oldest item; 0 without one."""
        return np.where(self.left > 0.0, now - self.begun_s, 0.0).max(axis=1)

    def room(self) -> Counts:
        """Return the places in each mailbox."""
        return np.maximum(0, _ROOM - self.queue)

    def give_up(self, place: int) -> int:
        """Empty a worker's slots and mailbox, and return the items that were in them."""
        number = int(self.in_flight[place] + self.queue[place])
        self.left[place] = 0.0
        self.queue[place] = 0
        return number

    def advance(self, now: float, speed: Array, open_slots: Counts, draw: Draw) -> None:
        """Work for a second from ``now``, and begin items of the queue in free slots."""
        for total in (self.ended, self.ended_tokens, self.moved_tokens, self.took_s, self.should_take_s, self.busy):
            total[:] = 0
        is_open = np.arange(self.slots)[None, :] < np.where(speed > 0.0, open_slots, 0)[:, None]
        left = self.left.ravel()
        time_left = np.ones(left.shape)
        free = np.flatnonzero(((self.left <= 0.0) & is_open & (self.queue > 0)[:, None]).ravel())
        self._begin(free, now, time_left, draw)
        working = np.flatnonzero(left > 0.0)
        for _ in range(_PASSES):
            if not len(working):
                break
            over = self._work(working, now, speed, time_left)
            working = self._begin(over[is_open.ravel()[over]], now, time_left, draw)
        self.busy /= self.slots

    def _work(self, slots: Counts, now: float, speed: Array, time_left: Array) -> Counts:
        """Work in these slots, and return those whose item ended."""
        left, expected, tokens = self.left.ravel(), self.expected_s.ravel(), self.tokens.ravel()
        who = slots // self.slots
        rate = np.maximum(speed[who], 1e-9)
        used = np.minimum(time_left[slots], left[slots] / rate)
        self.busy += self._by_worker(who, used)
        self.moved_tokens += self._by_worker(who, used * rate / expected[slots] * tokens[slots])
        left[slots] -= used * rate
        time_left[slots] -= used
        is_over = left[slots] <= 1e-9
        over, who = slots[is_over], who[is_over]
        left[over] = 0.0
        self.ended += np.bincount(who, minlength=self.number)
        self.ended_tokens += self._by_worker(who, tokens[over])
        self.took_s += self._by_worker(who, now + 1.0 - time_left[over] - self.begun_s.ravel()[over])
        self.should_take_s += self._by_worker(who, expected[over])
        return over

    def _by_worker(self, who: Counts, amounts: Array) -> Array:
        return np.bincount(who, weights=amounts, minlength=self.number).astype(np.float64)

    def _begin(self, free: Counts, now: float, time_left: Array, draw: Draw) -> Counts:
        """Begin items in free slots, as far as each worker's queue goes; return these slots."""
        who = free // self.slots
        rank = np.arange(len(free)) - np.searchsorted(who, who)
        is_taken = rank < self.queue[who]
        taken, who = free[is_taken], who[is_taken]
        if len(taken):
            self.queue -= np.bincount(who, minlength=self.number)
            self.left.ravel()[taken], self.expected_s.ravel()[taken], self.tokens.ravel()[taken] = draw(who)
            self.begun_s.ravel()[taken] = now + 1.0 - time_left[taken]
        return taken


def spread(number: int, room: Counts, turn: int) -> Counts:
    """Return how many of ``number`` items each mailbox gets, in turn from place ``turn`` on. Full
    ones are passed over, and what finds no room is left."""
    given = np.zeros_like(room)
    while number > 0:
        free = np.flatnonzero(room - given > 0)
        if not len(free):
            break
        each, rest = divmod(number, len(free))
        share = np.full(len(free), each)
        share[(np.arange(len(free)) - turn) % len(free) < rest] += 1
        share = np.minimum(share, (room - given)[free])
        given[free] += share
        number -= int(share.sum())
    return given
