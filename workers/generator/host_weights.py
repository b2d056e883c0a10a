"""Weights from another host: one worker of this host leads and fetches them, all map the result.

Each wait has a deadline: for a source, and for the leading worker (``HostFolder``).

Counters in the heartbeat, besides those of ``weight_receiver``: ``weights_sources_lost`` (replaced
during a transfer), ``weights_parts`` (arrived at this host while this worker waited),
``relayed_bytes`` (served to other hosts)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from pipeline.runtime.actor import ActorContext
from pipeline.runtime.answering import answer_requests
from pipeline.runtime.registry.contract import RelayAnnouncement, WeightsAnnouncement
from pipeline.weights import PARTS
from pipeline.weights.digest import PartDigests, digest_buffer
from pipeline.weights.host_fetch import HostFetch
from pipeline.weights.host_folder import HostFolder
from pipeline.weights.relay import PartialVersion, Relay, ancestors, width
from pipeline.weights.shared_files import MappedFile, SharedFileReader
from pipeline.weights.wire import Base, FetchCounts, WeightsSource
from protocol.channel import Requester, Responder
from protocol.endpoints import mailbox_endpoint
from protocol.errors import WeightsDamaged
from protocol.ids import Role

_LOOK_S = 0.05
_DELTA_SHARE = 20
"""Typical ratio of a version's size to a delta's, for planning who fetches from whom."""


class HostWeights:
    def __init__(
        self,
        ctx: ActorContext,
        reader: SharedFileReader,
        newer: asyncio.Event,
        on_learner: Callable[[str, Requester], None],
    ) -> None:
        """``newer`` is set when another version is announced."""
        self._ctx = ctx
        self._reader = reader
        self._newer = newer
        self._on_learner = on_learner
        self._folder = HostFolder(ctx.run_dir, shared_memory=ctx.config.weights.shared_memory)
        self._relay = Relay(ctx.clock)
        self._fetch = HostFetch(
            self._folder,
            self._relay,
            self._connect,
            ctx.clock,
            num_connections=ctx.config.weights.num_connections,
            timeout_s=ctx.config.weights.fetch_timeout_s,
            on_part=self._note_part,
        )
        self._responder: Responder | None = None
        self._serving: asyncio.Task[None] | None = None
        self._learner = ""

    async def fetch(self, wanted: WeightsAnnouncement, base: Base | None) -> MappedFile:
        """Return the announced version, verified and mapped; ``base`` is an older version held
        here.

        Raises FileNotFoundError when a newer one is announced or the leading worker makes no
        progress for too long, and what ``HostFetch.fetch`` raises."""
        limit_s = self._ctx.config.weights.fetch_timeout_s
        until, progress = self._ctx.clock.monotonic() + limit_s, self._folder.progress()
        while True:
            leads = self._folder.lead()
            mapped = await asyncio.to_thread(self._map, wanted, leads=leads)
            if mapped is not None:
                self._ctx.count("weights_bytes", wanted.num_bytes)
                if leads and not self._relay.holds(wanted):
                    await self._adopt(wanted, mapped)
                return mapped
            if leads:
                return await self._fetch_as_leader(wanted, base)
            if progress != (progress := self._folder.progress()):
                self._ctx.count(PARTS)
                until = self._ctx.clock.monotonic() + limit_s
            if self._newer.is_set() or self._ctx.clock.monotonic() >= until:
                raise FileNotFoundError(
                    f"the worker that fetches weights for this host has not fetched version {wanted.policy_version} yet"
                )
            await self._ctx.clock.wait(self._newer, _LOOK_S)

    def close(self) -> None:
        if self._serving is not None:
            self._serving.cancel()
        if self._responder is not None:
            self._responder.close()
        self._fetch.close()
        self._folder.close()

    def _map(self, wanted: WeightsAnnouncement, *, leads: bool) -> MappedFile | None:
        """Map the fetched file, if it exists.

        Raises WeightsDamaged for other bytes, unless this worker leads and can fetch it again."""
        is_damaged = False
        for path in self._folder.named(wanted.policy_version):
            # a cached mapping is renewed before the file is blamed
            for _ in range(2):
                try:
                    mapped = self._reader.open(path)
                except OSError:
                    break
                if mapped.data.size == wanted.num_bytes and digest_buffer(mapped.data) == wanted.digest:
                    return mapped
                is_damaged = True
                self._reader.forget(mapped)
        if is_damaged and not leads:
            raise WeightsDamaged(
                f"version {wanted.policy_version} was fetched for this host, and its bytes have changed since; expected digest "
                f"{wanted.digest}"
            )
        return None

    def _note_part(self) -> None:
        self._ctx.count(PARTS)
        self._folder.note_progress()

    async def _fetch_as_leader(self, wanted: WeightsAnnouncement, base: Base | None) -> MappedFile:
        ctx = self._ctx
        counts = FetchCounts()
        sources = await self._sources(wanted, base)
        try:
            path = await self._fetch.fetch(wanted, base, sources, counts)
            return await asyncio.to_thread(self._reader.open, path)
        finally:
            ctx.count("weights_bytes", counts.num_bytes)
            ctx.count("weights_deltas", counts.num_deltas - counts.num_refreshes)
            ctx.count("weights_refreshes", counts.num_refreshes)
            ctx.count("weights_sources_lost", counts.num_lost)
            ctx.counters["relayed_bytes"] = self._relay.num_bytes

    async def _adopt(self, wanted: WeightsAnnouncement, mapped: MappedFile) -> None:
        """Serve a version that the previous leader fetched."""
        if not self._ctx.config.weights.relay or not wanted.parts_digest:
            return
        algorithm = wanted.parts_digest.partition(":")[0]
        digests = await asyncio.to_thread(PartDigests.of, mapped.data, wanted.part_bytes, algorithm)
        holding = PartialVersion(wanted, mapped.data)
        holding.fill(digests)
        self._relay.hold(holding)
        await self._ctx.registry.announce_relay(self._ctx.who, self._serve())

    async def _sources(self, wanted: WeightsAnnouncement, base: Base | None) -> list[WeightsSource]:
        """Return where to fetch from, in order: relays above this one in the tree, then the
        learner. Raises FileNotFoundError when the learner that announced the version has left."""
        ctx = self._ctx
        keys = dict((await ctx.registry.endpoints(Role.LEARNER, silent=True)).values())
        if wanted.endpoint not in keys:
            raise FileNotFoundError(f"the learner that served version {wanted.policy_version} has left")
        learner = WeightsSource("the learner", wanted.endpoint, keys[wanted.endpoint])
        self._learner = learner.endpoint
        if not ctx.config.weights.relay:
            return [learner]
        place = await ctx.registry.announce_relay(ctx.who, self._serve())
        num_parts = -(-wanted.num_bytes // max(1, wanted.part_bytes))
        if base is not None:
            num_parts = -(-num_parts // _DELTA_SHARE)
        above = ancestors(place.position, width(num_parts, place.num_relays, is_passed_on_whole=base is not None))
        relays = await ctx.registry.relays(ctx.who, above)
        return [*(WeightsSource(relay.worker, relay.endpoint, relay.public_key) for relay in relays), learner]

    def _serve(self) -> RelayAnnouncement:
        """Start serving other hosts, if not done yet; return this relay's announcement."""
        ctx = self._ctx
        if self._responder is None:
            self._responder = ctx.transport.responder(mailbox_endpoint(ctx.config.wire, ctx.run_dir, ctx.who))
            self._serving = ctx.spawn("relay", answer_requests(self._responder, self._relay, ctx.clock, ctx.log))
        return RelayAnnouncement(
            worker=ctx.who.worker, endpoint=self._responder.endpoint, public_key=ctx.transport.public_key
        )

    def _connect(self, source: WeightsSource) -> Requester:
        requester = self._ctx.transport.requester(source.endpoint, server_key=source.public_key)
        if source.endpoint == self._learner:
            self._on_learner(source.endpoint, requester)
        return requester
