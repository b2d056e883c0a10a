"""A worker's main loop in time: one word at each moment, from two sources. Pure.

*Waits* are stretches, exact to a tenth of a second, and known while the worker has something open.
*Looks* are the words of heartbeats, one a second. A look counts where no wait is known, until the
next look. Waits become known up to ``LATE_US`` after their begin, so looks are held back for as
long."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Final, NamedTuple

LATE_US: Final = 32_000_000
_LOOK_HOLDS_US: Final = 3_000_000


class Interval(NamedTuple):
    """A word of a main loop."""

    begin_us: int
    end_us: int
    word: str


class WaitTrack:
    """One worker's stretches, in order, without overlap. It holds about half a minute of them."""

    def __init__(self) -> None:
        self._waits: deque[Interval] = deque()
        self._looks: deque[tuple[int, str]] = deque()
        self._drawn_us = -1
        self._present: Interval | None = None
        """The newest stretch, which may grow."""

    def wait(self, begin_us: int, end_us: int, word: str) -> None:
        """Take a wait. They come in the order of their ends."""
        self._waits.append(Interval(begin_us, end_us, word))

    def look(self, at_us: int, word: str) -> None:
        """Take a look. They come in the order of time; a repeat changes nothing."""
        if not self._looks or at_us > self._looks[-1][0]:
            self._looks.append((at_us, word))

    def until(self, now_us: int) -> Iterator[Interval]:
        """Yield the stretches that are certain at ``now_us``: all that begin ``LATE_US`` before."""
        yield from self._settled(now_us - LATE_US)

    def rest(self) -> Iterator[Interval]:
        """Yield all that are left."""
        yield from self._settled(None)
        if self._present is not None:
            yield self._present
            self._present = None

    def _settled(self, limit_us: int | None) -> Iterator[Interval]:
        while (begin_us := self._next_us()) is not None and (limit_us is None or begin_us < limit_us):
            if self._waits and begin_us == self._waits[0].begin_us:
                yield from self._draw(self._waits.popleft())
                continue
            at_us, word = self._looks.popleft()
            ends = [at_us + _LOOK_HOLDS_US]
            ends += [self._looks[0][0]] if self._looks else []
            ends += [self._waits[0].begin_us] if self._waits else []
            yield from self._draw(Interval(at_us, max(at_us, min(ends)), word))

    def _next_us(self) -> int | None:
        begins = [self._waits[0].begin_us] if self._waits else []
        begins += [self._looks[0][0]] if self._looks else []
        return min(begins, default=None)

    def _draw(self, found: Interval) -> Iterator[Interval]:
        begin_us = max(found.begin_us, self._drawn_us)
        if found.end_us <= begin_us:
            return
        self._drawn_us = found.end_us
        before = self._present
        if before is not None and before.word == found.word and before.end_us == begin_us:
            self._present = before._replace(end_us=found.end_us)
            return
        if before is not None:
            yield before
        self._present = Interval(begin_us, found.end_us, found.word)
