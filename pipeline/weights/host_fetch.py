"""Fetches versions for one host: a delta first, the whole version after a gap, from several sources.

Sources are tried in order, the learner last. When one fails, the next continues with the parts that are still
missing. A version is only named, and thus used, after the digest of all its bytes has matched; its parts are
served to other hosts before that (``pipeline.weights.relay``).

If all sources fail, the parts received so far are kept for the next try."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import structlog

from pipeline.runtime.clock import Clock
from pipeline.runtime.registry.contract import WeightsAnnouncement
from pipeline.weights.delta import apply
from pipeline.weights.digest import PartDigests, digest_buffer
from pipeline.weights.host_folder import HostFolder
from pipeline.weights.relay import HeldDelta, PartialVersion, Relay
from pipeline.weights.shared_files import SharedFile
from pipeline.weights.tensorfile import read_contents
from pipeline.weights.wire import SOURCE_FAILURES, Base, FetchCounts, WeightsSource, WireFetch
from protocol.channel import Requester
from protocol.errors import WeightsDamaged, WeightsRejected
from protocol.messages import BASE_VERSION

PATIENCE_S = 10.0
"""Longest wait for a relay before another source is tried."""
_BENCH_S = 60.0
"""A relay that failed is not tried again for this long, so that it does not delay every version."""

_PARTS_A_CONNECTION = 4
"""Fewer parts are not worth another connection."""
_DELTA_SHARE = 20
"""A delta's usual share of its version, to choose the number of connections."""

_log = structlog.get_logger(__name__)


class HostFetch:
    """Fetches for one host, one version at a time."""

    def __init__(
        self,
        folder: HostFolder,
        relay: Relay,
        connect: Callable[[WeightsSource], Requester],
        clock: Clock,
        *,
        num_connections: int,
        timeout_s: float,
        on_part: Callable[[], None] = lambda: None,
    ) -> None:
        """``connect`` opens a connection. ``timeout_s`` limits each answer of the learner. ``on_part`` is
        called for each part received."""
        self._folder = folder
        self._relay = relay
        self._connect = connect
        self._clock = clock
        self._num_connections = num_connections
        self._timeout_s = timeout_s
        self._on_part = on_part
        self._partial: dict[bool, tuple[SharedFile, PartialVersion]] = {}
        self._benched: dict[str, float] = {}

    async def fetch(
        self, wanted: WeightsAnnouncement, base: Base | None, sources: Sequence[WeightsSource], counts: FetchCounts
    ) -> Path:
        """Return the verified file of the wanted version. ``sources`` are in order, the learner last.

        Raises FileNotFoundError when a newer version is announced, WeightsDamaged for a wrong digest,
        WeightsRejected for contradictory answers, DeadlineExceeded without an answer, StorageFailed without
        room."""
        kind = wanted.policy_version == BASE_VERSION
        segment, holding = await self._begun(wanted, is_building=base is not None)
        now = self._clock.monotonic()
        self._benched = {worker: until for worker, until in self._benched.items() if until > now}
        live = [source for source in sources[:-1] if source.worker not in self._benched] + list(sources[-1:])
        try:
            if base is None or holding.num_present or not await self._build(segment, holding, base, live, counts):
                await self._copy(holding, live, counts)
        except FileNotFoundError:
            self._give_up(kind)
            raise
        digest = await asyncio.to_thread(digest_buffer, segment.data)
        if digest != wanted.digest:
            self._give_up(kind)
            raise WeightsDamaged(f"version {wanted.policy_version} came with digest {digest}, expected {wanted.digest}")
        del self._partial[kind]
        return self._folder.keep(segment, wanted.policy_version)

    def close(self) -> None:
        """Discard incomplete versions."""
        for kind in list(self._partial):
            self._give_up(kind)

    async def _begun(self, wanted: WeightsAnnouncement, *, is_building: bool) -> tuple[SharedFile, PartialVersion]:
        """Return the file to fill, with the parts from an earlier try."""
        kind = wanted.policy_version == BASE_VERSION
        if kind in self._partial and self._partial[kind][1].wanted.digest != wanted.digest:
            self._give_up(kind)
        if kind not in self._partial:
            if not wanted.parts_digest or wanted.part_bytes <= 0:
                raise WeightsRejected(
                    f"version {wanted.policy_version} was announced without digests of parts, so no other host can fetch it; "
                    "run the same release on all hosts"
                )
            segment = await asyncio.to_thread(self._folder.take, wanted.policy_version, wanted.num_bytes)
            self._partial[kind] = segment, PartialVersion(wanted, segment.data)
        segment, holding = self._partial[kind]
        self._relay.hold(holding, is_building=is_building)
        return segment, holding

    def _give_up(self, kind: bool) -> None:
        segment, holding = self._partial.pop(kind)
        self._relay.drop(holding)
        self._folder.discard(segment)

    async def _build(
        self,
        segment: SharedFile,
        holding: PartialVersion,
        base: Base,
        sources: list[WeightsSource],
        counts: FetchCounts,
    ) -> bool:
        """Build the version from a delta; return whether that worked."""
        wanted = holding.wanted
        delta = None
        # the learner makes deltas, and the parent may already have this one
        for source in dict.fromkeys((sources[0], sources[-1])):
            is_last = source is sources[-1]
            try:
                with self._open(
                    source, wanted, counts, num_bytes=wanted.num_bytes // _DELTA_SHARE, is_last=is_last
                ) as fetch:
                    delta = await fetch.delta(base.policy_version)
            except SOURCE_FAILURES as error:
                if is_last:
                    raise
                self._lost(source, error, counts)
            if delta is not None:
                break
        digests = None
        if delta is not None:
            counts.num_deltas += 1
            try:
                digests = await asyncio.to_thread(_apply, memoryview(delta), base, segment.data, wanted)
            except WeightsDamaged as error:
                counts.num_refreshes += 1
                _log.warning(
                    "weights_delta_refused",
                    version=wanted.policy_version, base=base.policy_version, reason=str(error),
                )  # fmt: skip
        if delta is None or digests is None:
            self._relay.hold_delta(None)
            return False
        holding.fill(digests)
        self._relay.hold_delta(HeldDelta(base.policy_version, wanted, delta))
        return True

    async def _copy(self, holding: PartialVersion, sources: list[WeightsSource], counts: FetchCounts) -> None:
        """Fetch the missing parts of the whole version."""
        for source in sources:
            is_last = source is sources[-1]
            try:
                with self._open(
                    source, holding.wanted, counts, num_bytes=holding.wanted.num_bytes, is_last=is_last
                ) as fetch:
                    await fetch.parts(holding)
            except SOURCE_FAILURES as error:
                if is_last:
                    raise
                self._lost(source, error, counts)
            else:
                return

    def _open(
        self,
        source: WeightsSource,
        wanted: WeightsAnnouncement,
        counts: FetchCounts,
        *,
        num_bytes: int,
        is_last: bool,
    ) -> WireFetch:
        wanted_connections = num_bytes // (wanted.part_bytes * _PARTS_A_CONNECTION)
        return WireFetch(
            wanted,
            source,
            partial(self._connect, source),
            self._clock,
            counts,
            num_connections=min(self._num_connections, wanted_connections),
            timeout_s=self._timeout_s if is_last else min(PATIENCE_S, self._timeout_s),
            on_part=self._on_part,
        )

    def _lost(self, source: WeightsSource, error: Exception, counts: FetchCounts) -> None:
        """Bench a relay that failed, unless it has only moved on to another version."""
        counts.num_lost += 1
        if not isinstance(error, FileNotFoundError):
            self._benched[source.worker] = self._clock.monotonic() + _BENCH_S
        _log.warning("weights_source_lost", source=source.worker, endpoint=source.endpoint, reason=str(error))


def _apply(delta: memoryview, base: Base, out: np.ndarray, wanted: WeightsAnnouncement) -> PartDigests:
    """Build a version; return the digests of its parts. Raises WeightsDamaged for a bad delta, another base,
    or a result that is not the announced version."""
    prelude, digest = apply(delta, base.data, out, head_bytes=read_contents(base.data).head_bytes)
    if prelude.base_digest != base.digest:
        raise WeightsDamaged(f"a delta from {prelude.base_digest} was offered for {base.digest}")
    if digest != wanted.digest:
        raise WeightsDamaged(f"a delta gave a version with digest {digest}, expected {wanted.digest}")
    digests = PartDigests.of(out, wanted.part_bytes, wanted.parts_digest.partition(":")[0])
    if digests.digest != wanted.parts_digest:
        raise WeightsDamaged(f"a delta gave parts with digest {digests.digest}, expected {wanted.parts_digest}")
    return digests
