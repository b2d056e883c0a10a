"""Tracks for stretches that overlap, such as the messages of a batch. Pure."""

from __future__ import annotations

from typing import Final

MAX_LANES: Final = 64


class Lanes:
    """Gives each stretch a lane in which nothing else is at its time.

    Stretches come in the order of their ends. So a lane is free for one that begins after the
    lane's last end."""

    def __init__(self) -> None:
        self._ends: list[int] = []

    def __len__(self) -> int:
        """Lanes so far."""
        return len(self._ends)

    def take(self, begin: int, end: int) -> int | None:
        """Return the lane of a stretch, from 0; None when all ``MAX_LANES`` are taken.

        It is the free lane whose last end is the latest, so that few lanes are needed."""
        free = [(last, -lane) for lane, last in enumerate(self._ends) if last <= begin]
        if free:
            lane = -max(free)[1]
            self._ends[lane] = end
            return lane
        if len(self._ends) >= MAX_LANES:
            return None
        self._ends.append(end)
        return len(self._ends) - 1
