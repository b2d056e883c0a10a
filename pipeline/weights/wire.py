"""Transfers the bytes of one version from another host over ZeroMQ, in ranges of a delta or of parts.

Several connections fetch from one *source*, the learner or a relay. Each has a few requests in flight, so
that neither end waits for the other. libzmq's I/O threads encrypt, and a new connection goes to the thread
with the fewest, not counting those still being made; so each is opened after the first part from the one
before. A slow link gets only one.

Allocations are bounded by the announcement in the ledger, never by a peer's numbers. Each part is checked
against its own digest before it is used (``pipeline.weights.digest``)."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Self

import numpy as np

from pipeline.runtime.clock import Clock
from pipeline.runtime.registry.contract import WeightsAnnouncement
from pipeline.weights.digest import PartDigests, table_bytes
from pipeline.weights.relay import PartialVersion
from pipeline.weights.store import MAX_DELTA_SHARE
from protocol.channel import Requester
from protocol.errors import DeadlineExceeded, WeightsDamaged, WeightsRejected, WireError
from protocol.messages import WeightsPart, WeightsRequest

UNREACHED_S = 1.5
"""A source without a connection for this long has failed."""
_UNDER_WAY = 3
"""Requests in flight per connection."""
_SLOW_S = 1.5
"""On a link whose parts take longer than this, one request per connection fills it."""
SOURCE_FAILURES = (FileNotFoundError, TimeoutError, ConnectionError, WeightsRejected, WireError)
"""Errors of one source, after which another source is tried."""


@dataclass(frozen=True, slots=True)
class Base:
    """A held version to which a delta can be applied."""

    policy_version: int
    digest: str
    data: np.ndarray
    """uint8 [bytes of the version]"""


@dataclass(frozen=True, slots=True)
class WeightsSource:
    worker: str
    endpoint: str
    public_key: str = ""


@dataclass(slots=True)
class FetchCounts:
    num_bytes: int = 0
    num_deltas: int = 0
    num_refreshes: int = 0
    """Whole versions fetched after a delta failed."""
    num_lost: int = 0
    """Sources that failed while others were left."""


class WireFetch:
    """The transfer of one version from one source. Use it in a ``with`` block."""

    def __init__(
        self,
        wanted: WeightsAnnouncement,
        source: WeightsSource,
        connect: Callable[[], Requester],
        clock: Clock,
        counts: FetchCounts,
        *,
        num_connections: int,
        timeout_s: float,
        on_part: Callable[[], None],
    ) -> None:
        """``connect`` opens a connection to the source; ``num_connections`` is their limit. ``timeout_s``
        limits each answer, and the wait for parts that are still coming. ``on_part`` is called for each part
        received."""
        self._wanted = wanted
        self._source = source
        self._connect = connect
        self._num_connections = num_connections
        self._requesters = [connect()]
        self._clock = clock
        self._counts = counts
        self._timeout_s = timeout_s
        self._on_part = on_part
        self._moved_s = clock.monotonic()
        self._is_slow = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for requester in self._requesters:
            requester.close()

    async def delta(self, base: int) -> bytearray | None:
        """Return the delta from version ``base``, unverified; None when the source has none.

        Raises SOURCE_FAILURES."""
        first = await self._ask(self._requesters[0], 0, base=base)
        if first is None or first.base != base:
            return None
        total = first.total_bytes
        if total > self._wanted.num_bytes // MAX_DELTA_SHARE:
            raise WeightsRejected(
                f"a delta of {total} bytes was offered for a version of {self._wanted.num_bytes} bytes"
            )
        delta = bytearray(total)
        size = first.data.size
        delta[:size] = first.data.data
        offsets = deque(range(size, total, size))

        async def fetch_one(requester: Requester, offset: int) -> None:
            part = await self._ask(requester, offset, base=base)
            if part is None or part.base != base or part.total_bytes != total:
                raise FileNotFoundError(f"the delta from version {base} was dropped during the transfer")
            if part.data.size != min(size, total - offset):
                raise WeightsRejected(
                    f"a part of a delta has {part.data.size} bytes, expected {min(size, total - offset)}"
                )
            delta[offset : offset + part.data.size] = part.data.data
            self._on_part()

        await self._pull(lambda: offsets.popleft() if offsets else None, offsets.appendleft, fetch_one)
        return delta

    async def parts(self, holding: PartialVersion) -> None:
        """Fetch all parts that ``holding`` lacks. After a failure, those received stay in it.

        Raises SOURCE_FAILURES: WeightsDamaged for a part with a wrong digest."""
        if holding.digests is None:
            holding.expect(await self._digests())
        part_bytes = self._wanted.part_bytes

        async def fetch_one(requester: Requester, index: int) -> None:
            part = await self._ask(requester, index * part_bytes)
            if part is None or part.base != -1 or part.total_bytes != self._wanted.num_bytes:
                raise WeightsRejected(
                    f"version {self._wanted.policy_version} has {self._wanted.num_bytes} bytes by its announcement, "
                    f"{0 if part is None else part.total_bytes} by {self._source.worker}"
                )
            if not holding.put(index, part.data):
                raise WeightsDamaged(
                    f"part {index} of version {self._wanted.policy_version} from {self._source.worker} does not have its "
                    f"announced digest, in version {self._wanted.digest}"
                )
            self._on_part()

        await self._pull(holding.take, holding.put_back, fetch_one)

    async def _digests(self) -> PartDigests:
        """Return the digests of the parts, checked against the announced digest."""
        wanted = self._wanted
        table = bytearray(table_bytes(wanted.num_bytes, wanted.part_bytes, wanted.parts_digest))
        place = 0
        while place < len(table):
            part = await self._ask(self._requesters[0], place, wants_digests=True)
            if part is None or part.total_bytes != len(table):
                raise WeightsRejected(
                    f"{self._source.worker} has {0 if part is None else part.total_bytes} bytes of digests of version "
                    f"{wanted.policy_version}, expected {len(table)}"
                )
            table[place : place + part.data.size] = part.data.data
            place += part.data.size
        return PartDigests.read(wanted.num_bytes, wanted.part_bytes, wanted.parts_digest, bytes(table))

    async def _pull(
        self,
        take: Callable[[], int | None],
        put_back: Callable[[int], None],
        fetch_one: Callable[[Requester, int], Awaitable[None]],
    ) -> None:
        """Fetch everything that ``take`` returns, on all connections at once."""
        failures: list[Exception] = []

        def begin(requester: Requester) -> None:
            for number in range(_UNDER_WAY):
                tasks.create_task(run(requester, number))

        async def run(requester: Requester, number: int) -> None:
            while not failures and not (number and self._is_slow) and (item := take()) is not None:
                is_done = False
                try:
                    await fetch_one(requester, item)
                    is_done = True
                except SOURCE_FAILURES as error:
                    failures.append(error)
                finally:
                    if not is_done:
                        put_back(item)
                is_newest = requester is self._requesters[-1]
                if is_done and is_newest and not self._is_slow and len(self._requesters) < self._num_connections:
                    self._requesters.append(self._connect())
                    begin(self._requesters[-1])

        async with asyncio.TaskGroup() as tasks:
            begin(self._requesters[0])
        if failures:
            raise failures[0]

    async def _ask(
        self, requester: Requester, offset: int, *, base: int = -1, wants_digests: bool = False
    ) -> WeightsPart | None:
        """Return a range; None if the source has no delta. Raises SOURCE_FAILURES."""
        version = self._wanted.policy_version
        request = WeightsRequest(
            version=version,
            offset=offset,
            max_bytes=self._wanted.part_bytes,
            base=base,
            digest=self._wanted.digest,
            wants_digests=wants_digests,
            apart=True,
        )
        while True:
            asked_s = self._clock.monotonic()
            part = await requester.request(request, timeout_s=self._timeout_s, unreached_s=UNREACHED_S)
            if not isinstance(part, WeightsPart) or part.version != version:
                raise WeightsRejected(f"requested bytes {offset}.. of version {version}, got a {type(part).__name__}")
            if part.data.size:
                break
            if not part.is_coming and base >= 0:
                return None
            if not part.is_coming:
                raise FileNotFoundError(
                    f"{self._source.worker} no longer holds version {version}; use the newest announcement"
                )
            if self._clock.monotonic() - self._moved_s > self._timeout_s:
                raise DeadlineExceeded(
                    f"{self._source.worker} has received nothing more of version {version} for {self._timeout_s:g} s"
                )
        if part.offset != offset or part.data.size > min(self._wanted.part_bytes, part.total_bytes - offset):
            raise WeightsRejected(
                f"requested bytes from {offset} of version {version}, got {part.data.size} from {part.offset} of "
                f"{part.total_bytes}"
            )
        self._moved_s = self._clock.monotonic()
        self._is_slow = self._is_slow or self._moved_s - asked_s > _SLOW_S
        self._counts.num_bytes += part.data.size
        return part
