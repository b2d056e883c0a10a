"""The observer: turns heartbeats into incidents and a history of metrics.

Once a second it reads the registry's heartbeats and the flow records of its host's workers. It
finds faults in the heartbeats (``pipeline.fleet.suspicions``), and writes incidents
(``pipeline.fleet.incidents``) and files of metrics, states, links and messages
(``pipeline.fleet.peers.segments``) into the run folder. The incident of a hung worker gets the stacks of
its role. The registry's answer is awaited for at most two seconds.

The run continues without the observer, and it holds nothing that a restart cannot rebuild: open
incidents are read back from their file. A registry that does not answer is itself an incident, of
the ledger.

Counters in the heartbeat: ``moments`` (readings of the fleet), ``missed_moments`` (the registry did
not answer), ``incidents`` (opened), ``incidents_open``, ``moments_left_out`` (never written, since
the disk refused them) and ``records_lost`` (flow records overwritten before they were read)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import ClassVar, Final

from pipeline.fleet.flow.host_records import HostRecordReader
from pipeline.fleet.incidents.book import IncidentBook
from pipeline.fleet.incidents.records import IncidentRecord, IncidentStep, RunIncidents, incident_records
from pipeline.fleet.limits import limits_of
from pipeline.fleet.peers.segments import SegmentWriter
from pipeline.fleet.peers.thresholds import read_thresholds
from pipeline.fleet.state import read_once
from pipeline.fleet.suspicions import FleetSuspicions
from pipeline.process.stacks.request import stands_of
from pipeline.runtime.actor import Actor, ActorContext
from pipeline.runtime.flow_ring import flow_folder
from pipeline.runtime.registry.contract import WaitingFor
from protocol.errors import DataError, LedgerError
from protocol.ids import Role

EVERY_S = 1.0
ANSWER_S = 2.0
_PAUSE_S = 0.25


class Observer(Actor):
    role: ClassVar[Role] = Role.OBSERVER

    def __init__(self, ctx: ActorContext) -> None:
        super().__init__(ctx)
        config = ctx.config
        self._fleet = FleetSuspicions(
            max_lag=config.weights.max_generator_lag, swaps_in_windows=config.generation.swap == "token"
        )
        self._limits = limits_of(config)
        self._book = IncidentBook()
        self._file = incident_records(ctx.run_dir)
        self._segments = SegmentWriter(ctx.run_dir, keep_bytes=ctx.config.observer.keep_mb << 20)
        self._records = HostRecordReader(flow_folder(ctx.run_dir))
        self._is_refused = False
        self._stands = HangStacks(ctx, self._add_stands)

    async def setup(self) -> None:
        if name := self.ctx.config.observer.thresholds:
            try:
                self._fleet.judge_by(await self.ctx.store(lambda: read_thresholds(Path(name))))
            except DataError as error:
                self.ctx.log.warning("thresholds_not_read", reason=str(error))
        try:
            known = await self.ctx.store(RunIncidents(self.ctx.run_dir).read)
        except OSError as error:
            self.ctx.log.warning("incidents_not_read", reason=str(error))
            known = ()
        self._book = IncidentBook(known, self.ctx.clock.time())

    async def run(self) -> None:
        next_s = self.ctx.clock.monotonic()
        while not self.ctx.draining.is_set():
            await self._observe()
            self.ctx.progress()
            self.ctx.waiting_for(WaitingFor.INPUT, "the next second")
            # Seconds missed in a pause of the process are skipped.
            next_s = max(next_s + EVERY_S, self.ctx.clock.monotonic())
            while not self.ctx.draining.is_set() and (left_s := next_s - self.ctx.clock.monotonic()) > 0.0:
                await self.ctx.clock.sleep(min(_PAUSE_S, left_s))

    async def drain(self) -> None:
        await self._record(self._book.close())
        await self._write_segment()
        self._records.close()

    async def _observe(self) -> None:
        clock = self.ctx.clock
        asked_s = clock.monotonic()
        try:
            async with asyncio.timeout(ANSWER_S):
                beats = await self.ctx.registry.heartbeats()
                weights = await self.ctx.registry.weights()
                failures = await self.ctx.registry.failures()
        except (LedgerError, TimeoutError) as error:
            reason = str(error) or f"no answer within {ANSWER_S:g} s"
            suspicions = self._fleet.away(clock.monotonic(), clock.time(), asked_s, reason)
            is_missed = True
        else:
            now_s, at_s = clock.monotonic(), clock.time()
            published = -1 if weights is None else weights.policy_version
            others = read_once((beat for beat in beats if beat.who.role is not Role.OBSERVER), self._limits)
            records = await self.ctx.compute(self._records.read, now_s, at_s)
            frame, suspicions = self._fleet.observe(now_s, at_s, others, published, failures)
            self._segments.add(at_s, frame, self._fleet.tables | records)
            self.ctx.counters["records_lost"] = self._records.num_lost
            is_missed = False
        await self._record(self._book.update(clock.time(), suspicions))
        if self._segments.is_due():
            await self._write_segment()
        # counted last, so that a counted moment has its incidents on disk
        if is_missed:
            self.ctx.count("missed_moments")
        else:
            self.ctx.count("moments")

    async def _record(self, records: Sequence[IncidentRecord]) -> None:
        for record in records:
            if record.step is IncidentStep.OPENED:
                self.ctx.count("incidents")
            if record.is_finding:
                self.ctx.log.warning(
                    "incident",
                    number=record.number,
                    component=record.component,
                    kind=record.kind,
                    found=record.sentence,
                )
        self.ctx.counters["incidents_open"] = len(self._book.open)
        if records:
            await self._stored(lambda: self._file.append(*records), "incidents_not_written")
        self._stands.examine(one.component for one in records if one.is_finding and one.kind in HANGS)

    async def _add_stands(self, component: str, lines: tuple[str, ...]) -> None:
        await self._record(self._book.add_stacks(component, lines))

    async def _write_segment(self) -> None:
        await self._stored(self._segments.take(), "metrics_not_written")
        self.ctx.counters["moments_left_out"] = self._segments.num_left_out

    async def _stored(self, write: Callable[[], None], event: str) -> None:
        """Write to the disk; a refusal is logged once, and the run continues."""
        try:
            await self.ctx.store(write)
        except OSError as error:
            if not self._is_refused:
                self.ctx.log.warning(event, reason=str(error))
            self._is_refused = True
        else:
            self._is_refused = False


HANGS: Final = frozenset({"hung", "stuck", "deadlock"})
"""Kinds of incidents whose workers' stacks are read."""
STACKS_ANSWER_S: Final = 1.5
_LOOKS = 2
"""In a single sample every worker seems to stand still."""

Told = Callable[[str, tuple[str, ...]], Awaitable[None]]
"""Receives a component and the lines of its stacks."""


class HangStacks:
    """Adds the stacks of a hung worker, and of its role, to its new incident. Workers of this host
    have ``STACKS_ANSWER_S`` for each of two samples; the observer continues in the meantime."""

    def __init__(self, ctx: ActorContext, tell: Told) -> None:
        self._ctx, self._tell = ctx, tell
        self._wanted: dict[str, None] = {}
        self._is_examining = False

    def examine(self, components: Iterable[str]) -> None:
        """Examine components: single workers, or those of a cycle, joined by ``>``."""
        self._wanted |= dict.fromkeys(components)
        if self._wanted and not self._is_examining:
            self._is_examining = True
            self._ctx.spawn("stacks", self._examine(), endless=False)

    async def _examine(self) -> None:
        while self._wanted:
            wanted, self._wanted = self._wanted, {}
            workers = sorted({worker for component in wanted for worker in component.split(">")})
            read = partial(stands_of, self._ctx.run_dir, workers, num_looks=_LOOKS, answer_s=STACKS_ANSWER_S)
            stands = await asyncio.to_thread(read)
            for component in wanted:
                known = [stands[worker] for worker in component.split(">") if worker in stands]
                lines = known[0] if len(known) == 1 else tuple(of[0] for of in known)
                if lines:
                    await self._tell(component, lines)
        self._is_examining = False
