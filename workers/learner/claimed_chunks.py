"""The chunks of the claim in hand, as flow records: claimed, trained on, published."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from pipeline.ledger.types import ClaimedUnit
from pipeline.runtime.clock import Clock
from pipeline.runtime.flow_recorder import FlowRecorder
from pipeline.runtime.open_messages import Inbox, Parcel
from protocol.ids import ChunkId


class ClaimedChunks:
    """The learner's end of the way of chunks: the ledger's claims, in place of a mailbox."""

    def __init__(self, worker: str, clock: Clock, flow: FlowRecorder) -> None:
        self._inbox = Inbox(worker, clock, flow)
        self._open: dict[ChunkId, str] = {}
        """Each chunk's unit."""

    def claimed(self, units: Sequence[ClaimedUnit], version: int) -> None:
        """Take the units of an update that will publish ``version``."""
        for unit in units:
            for scored in (each for chunks in unit.trajectories for each in chunks):
                chunk = scored.chunk
                self._open[chunk.id] = unit.name
                self._inbox.took(chunk.id, parcel=Parcel(str(chunk.id), chunk.num_tokens, version))

    def begun(self) -> None:
        """Record the begin of the update."""
        self._inbox.begun(self._open)

    def trained(self) -> None:
        """Record its end: the version is to be published."""
        for chunk in self._open:
            self._inbox.done(chunk)

    def published(self, dropped: Collection[str]) -> None:
        """End them all. Those of the ``dropped`` units were not trained on."""
        self._inbox.ended([chunk for chunk, unit in self._open.items() if unit in dropped])
        for chunk in self._open:
            self._inbox.stored(chunk)
        self._open.clear()
