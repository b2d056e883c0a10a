"""The observer: heartbeats in, incidents and a history of metrics out.

Once a second it reads the registry's heartbeats, and the flow records of its host's workers. It
writes incidents (``pipeline.incidents``) and files of metrics and messages
(``pipeline.watch.segments``) into the run's folder. It waits for the next second, and for the
registry's answer, which comes at once or not at all.

The run goes on without it. It holds nothing that a restart cannot rebuild: open incidents are read
again from their file. A registry without an answer is itself an incident, of the ledger.

Counters in the heartbeat: ``moments`` (looks at the fleet), ``missed_moments`` (without an answer
of the registry), ``incidents`` (opened), ``incidents_open``. ``moments_left_out`` counts moments
that never came to the disk, since it refused them. ``records_lost`` counts flow records that were
overwritten before they were read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from pipeline.flow.host_records import HostRecordReader
from pipeline.incidents.book import IncidentBook, Suspicion
from pipeline.incidents.file import IncidentFile, RunIncidents
from pipeline.incidents.records import IncidentRecord, IncidentStep
from pipeline.runtime.actor import Actor, ActorContext
from pipeline.runtime.flow_ring import flow_folder
from pipeline.runtime.registry.contract import Heartbeat, WaitingFor
from pipeline.watch.findings import Finding
from pipeline.watch.heartbeats import FrameMaker
from pipeline.watch.segments import SegmentWriter
from pipeline.watch.watcher import Watch
from protocol.errors import LedgerError
from protocol.ids import Role

EVERY_S = 1.0
_PAUSE_S = 0.25
"""Most time before a drain is noticed."""
AWAY_S = 3.0
"""A registry without an answer for so long is an incident."""
HELD_S = 60.0
"""A finding of similarity holds for so long; then the watch may find it again."""
LEDGER = "ledger"


class Observer(Actor):
    """The worker."""

    role: ClassVar[Role] = Role.OBSERVER

    def __init__(self, ctx: ActorContext) -> None:
        super().__init__(ctx)
        self._frames = FrameMaker()
        self._watch = Watch()
        self._book = IncidentBook()
        self._file = IncidentFile(ctx.run_dir)
        self._segments = SegmentWriter(ctx.run_dir, keep_bytes=ctx.config.observer.keep_mb << 20)
        self._records = HostRecordReader(flow_folder(ctx.run_dir))
        self._held: dict[tuple[str, str], tuple[Finding, float]] = {}
        """By worker and kind: the newest finding, and until when it holds."""
        self._away_since_s: float | None = None
        """First moment without an answer of the registry, by the monotonic clock."""
        self._is_refused = False

    async def setup(self) -> None:
        """Read the incidents of earlier observers of this run."""
        try:
            known = await self.ctx.store(RunIncidents(self.ctx.run_dir).read)
        except OSError as error:
            self.ctx.log.warning("incidents_not_read", reason=str(error))
            known = ()
        self._book = IncidentBook(known, self.ctx.clock.time())

    async def run(self) -> None:
        """Look at the fleet once a second until the drain."""
        next_s = self.ctx.clock.monotonic()
        while not self.ctx.draining.is_set():
            await self._look()
            self.ctx.progress()
            self.ctx.waiting_for(WaitingFor.INPUT, "the next second")
            # After a pause of the process the missed seconds are not made up for.
            next_s = max(next_s + EVERY_S, self.ctx.clock.monotonic())
            while not self.ctx.draining.is_set() and (left_s := next_s - self.ctx.clock.monotonic()) > 0.0:
                await self.ctx.clock.sleep(min(_PAUSE_S, left_s))

    async def drain(self) -> None:
        """End the open incidents, and write the metrics that have not come to the disk."""
        await self._record(self._book.close())
        await self._write_segment()
        self._records.close()

    async def _look(self) -> None:
        suspicions: list[Suspicion] = []
        try:
            beats = await self.ctx.registry.heartbeats()
            weights = await self.ctx.registry.weights()
        except LedgerError as error:
            suspicions += self._away(str(error))
            self.ctx.count("missed_moments")
        else:
            self._away_since_s = None
            published = -1 if weights is None else weights.policy_version
            records = await self.ctx.compute(self._records.read, self.ctx.clock.monotonic(), self.ctx.clock.time())
            suspicions += self._judge(
                [beat for beat in beats if beat.who.role is not Role.OBSERVER], published, records
            )
            self.ctx.counters["records_lost"] = self._records.num_lost
            self.ctx.count("moments")
        await self._record(self._book.look(self.ctx.clock.time(), suspicions))
        if self._segments.is_due():
            await self._write_segment()

    def _judge(
        self, beats: Sequence[Heartbeat], published: int, records: Mapping[str, NDArray[np.void]]
    ) -> list[Suspicion]:
        now_s, at_s = self.ctx.clock.monotonic(), self.ctx.clock.time()
        frame = self._frames.frame(now_s, beats, published)
        self._segments.add(at_s, frame, records)
        for finding in self._watch.tick(frame):
            self._held[finding.worker, finding.kind] = (finding, now_s + HELD_S)
        for key, (finding, until_s) in list(self._held.items()):
            if self._watch.lasts(finding):
                self._held[key] = (finding, now_s + EVERY_S)
            elif now_s >= until_s:
                del self._held[key]
                self._watch.forget(finding.worker)
        return [
            Suspicion(
                component=finding.worker,
                kind=finding.kind,
                since_s=at_s - (now_s - finding.since_s),
                sentence=finding.sentence,
                role=finding.role,
                score=finding.score,
            )
            for finding, _ in self._held.values()
        ]

    def _away(self, reason: str) -> list[Suspicion]:
        now_s, at_s = self.ctx.clock.monotonic(), self.ctx.clock.time()
        if self._away_since_s is None:
            self._away_since_s = now_s
        away_s = now_s - self._away_since_s
        if away_s < AWAY_S:
            return []
        sentence = f"the registry has not answered for {away_s:.0f} s; the limit is {AWAY_S:g} s"
        return [Suspicion(LEDGER, "silent", at_s - away_s, sentence, score=away_s / AWAY_S, evidence=(reason,))]

    async def _record(self, records: Sequence[IncidentRecord]) -> None:
        for record in records:
            if record.step is IncidentStep.OPENED:
                self.ctx.count("incidents")
            if record.step is not IncidentStep.ENDED:
                self.ctx.log.warning(
                    "incident",
                    number=record.number,
                    component=record.component,
                    kind=record.kind,
                    found=record.sentence,
                )
        still_open = self._book.open
        self.ctx.counters["incidents_open"] = len(still_open)
        if records:
            await self._stored(lambda: self._file.append(records, still_open), "incidents_not_written")

    async def _write_segment(self) -> None:
        await self._stored(self._segments.take(), "metrics_not_written")
        self.ctx.counters["moments_left_out"] = self._segments.num_left_out

    async def _stored(self, write: Callable[[], None], event: str) -> None:
        """Write to the disk. The log names a refusal once, and the run goes on."""
        try:
            await self.ctx.store(write)
        except OSError as error:
            if not self._is_refused:
                self.ctx.log.warning(event, reason=str(error))
            self._is_refused = True
        else:
            self._is_refused = False
