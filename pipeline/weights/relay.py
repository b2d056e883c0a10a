"""A relay: a host answers other hosts' requests with the parts of a version that it has.

A part is served once its digest has matched, while other parts are still arriving. A request for a part that
has not arrived waits a moment for it; after that the answer is that it is coming. A delta is served once its
result has been verified.

Relays form a tree below the learner, in the order in which they arrived. Since a relay passes parts on while
it still receives others, a narrow tree takes about as long as one copy, whatever its depth: the learner sends
``width`` copies, and each level adds a few parts. A delta, however, is only passed on when it is complete,
since only its result has a digest. So each level adds the time of a delta, and a wider tree is better. A
host's parent always arrived before it, so hosts never wait for each other in a circle, even if they see
different numbers of relays."""

from __future__ import annotations

import asyncio
from collections import deque

import numpy as np

from pipeline.runtime.clock import Clock
from pipeline.runtime.registry.contract import WeightsAnnouncement
from pipeline.weights.digest import PartDigests
from pipeline.weights.store import nothing, range_of
from protocol.errors import UnknownMessage
from protocol.messages import BASE_VERSION, Message, WeightsPart, WeightsRequest

HOLD_S = 1.0
"""Longest time for which a request waits for bytes that have not arrived."""
_DIGESTS = -1
"""Takes the place of a part's number, for the digests of all parts."""
MAX_WIDTH = 8
"""Most hosts that fetch from one source."""
_HOP_PARTS = 2
"""Delay of a level that passes parts on, in times of a part: the part itself, and a request."""


class _Changes:
    """Wakes all waiting tasks at each change."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    async def wait(self, clock: Clock, seconds: float) -> None:
        """Return at the next change, or after ``seconds``."""
        if self._event.is_set():
            self._event = asyncio.Event()
        await clock.wait(self._event, seconds)

    def tell(self) -> None:
        before, self._event = self._event, asyncio.Event()
        before.set()


class PartialVersion:
    """A version of which some parts have arrived. Used by one event loop."""

    def __init__(self, wanted: WeightsAnnouncement, data: np.ndarray) -> None:
        """``data``, uint8 [bytes of the version], is filled by :meth:`put`."""
        self.wanted = wanted
        self.data = data
        self.digests: PartDigests | None = None
        self.num_parts = -(-wanted.num_bytes // wanted.part_bytes)
        self._present = np.zeros(self.num_parts, np.bool_)
        self._missing = deque(range(self.num_parts))
        self._awaited: dict[int, _Changes] = {}
        """Waiting requests by part, so that a part wakes only its own."""

    @property
    def num_present(self) -> int:
        return int(self._present.sum())

    @property
    def is_whole(self) -> bool:
        return bool(self._present.all())

    def take(self) -> int | None:
        """Return the next part to fetch, lowest first; None when all others have arrived or are being
        fetched."""
        return self._missing.popleft() if self._missing else None

    def put_back(self, index: int) -> None:
        """Return a part that was taken but did not arrive."""
        self._missing.appendleft(index)

    def put(self, index: int, data: np.ndarray) -> bool:
        """Add a part; return False, and add nothing, if its digest differs."""
        assert self.digests is not None, "the digests come first"
        if not self.digests.matches(index, data):
            return False
        start = index * self.wanted.part_bytes
        self.data[start : start + data.size] = data
        self._present[index] = True
        self._tell(index)
        return True

    def expect(self, digests: PartDigests) -> None:
        self.digests = digests
        self._tell(_DIGESTS)

    def fill(self, digests: PartDigests) -> None:
        """Record that all bytes have arrived and are verified."""
        self.digests = digests
        self._present[:] = True
        self._missing.clear()
        for index in list(self._awaited):
            self._tell(index)

    def has(self, request: WeightsRequest) -> bool:
        """Return whether the first requested byte has arrived."""
        if request.wants_digests:
            return self.digests is not None
        index = request.offset // self.wanted.part_bytes
        return index >= self.num_parts or bool(self._present[index])

    def part(self, request: WeightsRequest) -> WeightsPart:
        """Return the requested range, up to the end of the part in which it begins."""
        assert self.digests is not None
        if request.wants_digests:
            table = np.frombuffer(self.digests.table, np.uint8)
            return range_of(request, table, base=-1, max_bytes=self.wanted.part_bytes)
        rest = self.wanted.part_bytes - request.offset % self.wanted.part_bytes
        return range_of(request, self.data, base=-1, max_bytes=rest)

    async def wait(self, request: WeightsRequest, clock: Clock, seconds: float) -> None:
        """Return once the requested bytes have arrived, or after ``seconds``."""
        index = _DIGESTS if request.wants_digests else request.offset // self.wanted.part_bytes
        await self._awaited.setdefault(index, _Changes()).wait(clock, seconds)

    def _tell(self, index: int) -> None:
        if (waiting := self._awaited.pop(index, None)) is not None:
            waiting.tell()


class HeldDelta:
    """A delta from version ``base`` to ``wanted`` whose result has been verified."""

    def __init__(self, base: int, wanted: WeightsAnnouncement, data: bytearray) -> None:
        self.base = base
        self.wanted = wanted
        self.data = np.frombuffer(data, np.uint8)


class Relay:
    """The versions that a host serves: the newest one, and the base weights of adapters."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._holdings: dict[bool, PartialVersion] = {}
        self._delta: HeldDelta | None = None
        self._is_building = False
        self._changed = _Changes()
        self.num_bytes = 0
        """Bytes of all answers."""

    def hold(self, holding: PartialVersion, *, is_building: bool = False) -> None:
        """Serve a version from now on instead of the previous one.

        ``is_building`` says that it is being built from a delta, so that requests for that delta may wait for
        it."""
        is_base = holding.wanted.policy_version == BASE_VERSION
        self._holdings[is_base] = holding
        if not is_base:
            self._is_building = is_building
            if self._delta is not None and self._delta.wanted.digest != holding.wanted.digest:
                self._delta = None
        self._changed.tell()

    def hold_delta(self, delta: HeldDelta | None) -> None:
        """Serve a delta to the newest version; None if there will not be one."""
        self._delta, self._is_building = delta, False
        self._changed.tell()

    def holds(self, wanted: WeightsAnnouncement) -> bool:
        """Return whether this version is being served, or was the last one to be."""
        holding = self._holdings.get(wanted.policy_version == BASE_VERSION)
        return holding is not None and holding.wanted.digest == wanted.digest

    def drop(self, holding: PartialVersion) -> None:
        self._holdings = {kind: other for kind, other in self._holdings.items() if other is not holding}

    def answer_now(self, request: Message) -> WeightsPart | None:
        """Return the requested range, or an empty one if it is not served here; None while it is arriving.
        Raises UnknownMessage for anything but a WeightsRequest."""
        if not isinstance(request, WeightsRequest):
            raise UnknownMessage(f"a relay got a {type(request).__name__}; it answers WeightsRequest only")
        part = self._now(request)
        self.num_bytes += part.data.size
        return None if part.is_coming else part

    async def answer_later(self, request: Message) -> WeightsPart:
        """Return the range once it has arrived, or the answer that it is still coming."""
        assert isinstance(request, WeightsRequest)
        until = self._clock.monotonic() + HOLD_S
        while (left_s := until - self._clock.monotonic()) > 0.0:
            if (part := self.answer_now(request)) is not None:
                return part
            holding = self._held(request)
            if holding is None or request.base >= 0:
                await self._changed.wait(self._clock, left_s)
            else:
                await holding.wait(request, self._clock, left_s)
        return self._now(request)

    def _now(self, request: WeightsRequest) -> WeightsPart:
        holding = self._held(request)
        if holding is None:
            return nothing(request, is_coming=self._expects(request))
        delta = self._delta
        if request.base >= 0 and not request.wants_digests:
            if delta is not None and delta.base == request.base and delta.wanted.digest == holding.wanted.digest:
                return range_of(request, delta.data, base=delta.base, max_bytes=holding.wanted.part_bytes)
            return nothing(request, is_coming=self._is_building)
        return holding.part(request) if holding.has(request) else nothing(request, is_coming=True)

    def _held(self, request: WeightsRequest) -> PartialVersion | None:
        holding = self._holdings.get(request.version == BASE_VERSION)
        is_it = holding is not None and holding.wanted.policy_version == request.version
        return holding if is_it and holding is not None and request.digest == holding.wanted.digest else None

    def _expects(self, request: WeightsRequest) -> bool:
        """Return whether this host will soon learn of a version newer than its own."""
        holding = self._holdings.get(request.version == BASE_VERSION)
        return holding is None or holding.wanted.policy_version < request.version


def width(num_parts: int, num_relays: int, *, is_passed_on_whole: bool) -> int:
    """Return how many relays fetch from each source so that the last relay finishes soonest.

    ``num_parts`` is the size of the transfer, in parts. ``is_passed_on_whole``: a relay passes nothing on
    before it has everything."""

    def cost(width: int) -> int:
        depth = _depth(num_relays, width)
        per_level = width * num_parts
        # a delta is applied before it is passed on, which takes about as long as receiving it
        return depth * (per_level + num_parts) if is_passed_on_whole else per_level + depth * _HOP_PARTS

    return min(range(1, MAX_WIDTH + 1), key=cost)


def ancestors(position: int, width: int) -> list[int]:
    """Return the positions from which the relay at ``position`` fetches, its parent first.

    The learner is above the last one; if the list is empty, it is the parent."""
    found: list[int] = []
    while (position := position // width - 1) >= 0:
        found.append(position)
    return found


def _depth(num_relays: int, width: int) -> int:
    return len(ancestors(num_relays - 1, width)) + 1 if num_relays else 0
