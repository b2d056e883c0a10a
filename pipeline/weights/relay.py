"""A relay: a host answers other hosts' requests with the parts of a version that it has.

A part is served once its digest has matched, while other parts are still on their way. A request
for a part that has not arrived waits for it a moment; then the answer is that the part is coming. A
delta is served once the version that it makes has been verified.

Relays form a tree below the learner, by the order in which they came. Since a relay passes parts on
while it still receives others, a narrow tree costs about one copy's time whatever its depth: the
learner sends ``width`` copies, and each level adds a few parts. A delta is passed on only once it is
whole, since only its result has a digest. So each level adds a delta's time, and a wider tree is
better. A host's parent always came before it, so hosts never wait for one another in a circle, even
if they see different numbers of relays."""

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
"""Longest wait of a request for bytes that have not arrived."""
_DIGESTS = -1
"""Instead of a part's number: the digests of all parts."""
MAX_WIDTH = 8
"""Most hosts that fetch from one source."""
_HOP_PARTS = 2
"""Delay of a level that passes parts on, in times of a part: the part itself, and a request."""


class _Changes:
    """Wakes all that wait, at each change."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    async def wait(self, clock: Clock, seconds: float) -> None:
        """Return at the next change, or after ``seconds``."""
        if self._event.is_set():
            self._event = asyncio.Event()
        await clock.wait(self._event, seconds)

    def tell(self) -> None:
        """Wake all."""
        before, self._event = self._event, asyncio.Event()
        before.set()


class PartialVersion:
    """One version, as far as it is here. Used by one event loop."""

    def __init__(self, wanted: WeightsAnnouncement, data: np.ndarray) -> None:
        """``data``: uint8 [bytes of the version], to be filled by :meth:`put`."""
        self.wanted = wanted
        self.data = data
        self.digests: PartDigests | None = None
        self.num_parts = -(-wanted.num_bytes // wanted.part_bytes)
        self._present = np.zeros(self.num_parts, np.bool_)
        self._missing = deque(range(self.num_parts))
        self._awaited: dict[int, _Changes] = {}
        """By part. Each wakes its own requests alone."""

    @property
    def num_present(self) -> int:
        """Verified parts."""
        return int(self._present.sum())

    @property
    def is_whole(self) -> bool:
        """Whether all parts are here."""
        return bool(self._present.all())

    def take(self) -> int | None:
        """Return a part to fetch, lowest first; None when all others are here or being fetched."""
        return self._missing.popleft() if self._missing else None

    def put_back(self, index: int) -> None:
        """Return a taken part that did not come."""
        self._missing.appendleft(index)

    def put(self, index: int, data: np.ndarray) -> bool:
        """Add a taken part; return False, and add nothing, when its digest differs."""
        assert self.digests is not None, "the digests come first"
        if not self.digests.matches(index, data):
            return False
        start = index * self.wanted.part_bytes
        self.data[start : start + data.size] = data
        self._present[index] = True
        self._tell(index)
        return True

    def expect(self, digests: PartDigests) -> None:
        """Note the digests of all parts."""
        self.digests = digests
        self._tell(_DIGESTS)

    def fill(self, digests: PartDigests) -> None:
        """Note that all bytes are here and verified."""
        self.digests = digests
        self._present[:] = True
        self._missing.clear()
        for index in list(self._awaited):
            self._tell(index)

    def has(self, request: WeightsRequest) -> bool:
        """Return whether the first requested byte is here."""
        if request.wants_digests:
            return self.digests is not None
        index = request.offset // self.wanted.part_bytes
        return index >= self.num_parts or bool(self._present[index])

    def part(self, request: WeightsRequest) -> WeightsPart:
        """Return the requested range, up to the end of the part that it begins in."""
        assert self.digests is not None
        if request.wants_digests:
            table = np.frombuffer(self.digests.table, np.uint8)
            return range_of(request, table, base=-1, max_bytes=self.wanted.part_bytes)
        rest = self.wanted.part_bytes - request.offset % self.wanted.part_bytes
        return range_of(request, self.data, base=-1, max_bytes=rest)

    async def wait(self, request: WeightsRequest, clock: Clock, seconds: float) -> None:
        """Return once what is requested has come, or after ``seconds``."""
        index = _DIGESTS if request.wants_digests else request.offset // self.wanted.part_bytes
        await self._awaited.setdefault(index, _Changes()).wait(clock, seconds)

    def _tell(self, index: int) -> None:
        if (waiting := self._awaited.pop(index, None)) is not None:
            waiting.tell()


class HeldDelta:
    """A delta whose result has been verified."""

    def __init__(self, base: int, wanted: WeightsAnnouncement, data: bytearray) -> None:
        """From version ``base`` to ``wanted``."""
        self.base = base
        self.wanted = wanted
        self.data = np.frombuffer(data, np.uint8)


class Relay:
    """The versions that a host serves: the newest, and adapters' base weights."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._holdings: dict[bool, PartialVersion] = {}
        self._delta: HeldDelta | None = None
        self._is_building = False
        self._changed = _Changes()
        self.num_bytes = 0
        """Bytes of all answers."""

    def hold(self, holding: PartialVersion, *, is_building: bool = False) -> None:
        """Serve a version from now on, in place of the one before.

        ``is_building``: by a delta, so that requests for the same delta may wait for it."""
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
        """Return whether this version is served, or was the last to be."""
        holding = self._holdings.get(wanted.policy_version == BASE_VERSION)
        return holding is not None and holding.wanted.digest == wanted.digest

    def drop(self, holding: PartialVersion) -> None:
        """Serve a version no more."""
        self._holdings = {kind: other for kind, other in self._holdings.items() if other is not holding}

    def answer_now(self, request: Message) -> WeightsPart | None:
        """Return the requested range, or an empty one for what is not served here; None while it is
        coming. Raises UnknownMessage for anything but a WeightsRequest."""
        if not isinstance(request, WeightsRequest):
            raise UnknownMessage(f"a relay got a {type(request).__name__}; it answers WeightsRequest only")
        part = self._now(request)
        self.num_bytes += part.data.size
        return None if part.is_coming else part

    async def answer_later(self, request: Message) -> WeightsPart:
        """Return the range once it has come, or that it is still coming."""
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
        """Return the answer at this moment."""
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
        """Return whether this host will soon learn of a version that is newer than its own."""
        holding = self._holdings.get(request.version == BASE_VERSION)
        return holding is None or holding.wanted.policy_version < request.version


def width(num_parts: int, num_relays: int, *, is_passed_on_whole: bool) -> int:
    """Return how many relays fetch from each source, so that the last one has all soonest.

    ``num_parts``: size of what is fetched, in parts. ``is_passed_on_whole``: a relay passes nothing
    on before it has all."""

    def cost(width: int) -> int:
        depth = _depth(num_relays, width)
        per_level = width * num_parts
        # a delta is applied before it is passed on, which takes about as long as to receive it
        return depth * (per_level + num_parts) if is_passed_on_whole else per_level + depth * _HOP_PARTS

    return min(range(1, MAX_WIDTH + 1), key=cost)


def ancestors(position: int, width: int) -> list[int]:
    """Return the places from which the relay at ``position`` fetches, its parent first.

    The learner is above the last one. Empty: the learner is the parent."""
    found: list[int] = []
    while (position := position // width - 1) >= 0:
        found.append(position)
    return found


def _depth(num_relays: int, width: int) -> int:
    """Return the number of levels below the learner."""
    return len(ancestors(num_relays - 1, width)) + 1 if num_relays else 0
