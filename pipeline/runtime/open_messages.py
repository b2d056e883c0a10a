"""Tracks the open messages at each end of a worker's links.

An *outbox* has the messages to a role from their creation until a link takes them. An *inbox* has received
messages until the ledger has their result::

    outbox   produced ──> sent, or given up
    inbox    received ──> begun ──> done ──> stored, or ended without a result

So ``produced >= sent`` and ``received >= done >= stored``. Each open message is a ``MessageRecord``, from which its
slot in the ring and its span are made when it ends. The caller limits how many messages are open, and ends every
one that it took."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Final

from pipeline.runtime.clock import Clock
from pipeline.runtime.flow_ring import FlowRingWriter, LinkSide, LinkState
from pipeline.runtime.message_record import MessageOutcome, MessageRecord
from pipeline.runtime.notifications import LOOK_ANYWAY_S
from pipeline.runtime.registry.contract import MAX_NAMED_LINKS, OTHER_LINKS, LinkReport, link_name
from pipeline.runtime.tracing import TrajectorySpans
from protocol.channel import LinkStats
from protocol.ids import ChunkId, Role
from protocol.inbound import MAX_PEERS
from protocol.trajectory import TrajectoryChunk

STATES_EVERY_S: Final = 0.1


class FlowRecorder:
    """Records a worker's messages: in its flow ring (``pipeline.runtime.flow_ring``) and as spans
    (``pipeline.runtime.tracing``), each if there is one.

    States are recorded every 100 ms while a message is open. Used only by the main loop."""

    def __init__(self, clock: Clock, ring: FlowRingWriter | None = None, spans: TrajectorySpans | None = None) -> None:
        self._clock, self._ring, self._spans = clock, ring, spans
        self._sources: list[Callable[[float], Sequence[LinkState]]] = []
        self._worker: Callable[[float], LinkState | None] = lambda _: None
        self._opened = asyncio.Event()

    def watch(self, states: Callable[[float], Sequence[LinkState]]) -> None:
        """Record ``states(now_s)``, the ends with open messages, while there are any."""
        self._sources.append(states)

    def watch_worker(self, state: Callable[[float], LinkState]) -> None:
        self._worker = state

    def opened(self) -> None:
        """Start recording states."""
        self._opened.set()

    def ended(self, record: MessageRecord, outcome: MessageOutcome) -> str:
        """Record a message's end; return its span's context, empty if it has none."""
        record.outcome, record.ended_s = outcome, self._clock.monotonic()
        if self._ring is not None and record.link is not None:
            self._ring.message(record)
        return "" if self._spans is None else self._spans.add(record)

    async def run(self) -> None:
        """Record states until cancelled."""
        while self._ring is not None:
            await self._clock.wait(self._opened, LOOK_ANYWAY_S)
            self._opened.clear()
            while self.record(self._ring):
                await self._clock.sleep(STATES_EVERY_S)

    def record(self, ring: FlowRingWriter) -> bool:
        """Record the current states; return whether any message is open."""
        now_s = self._clock.monotonic()
        states = [state for source in self._sources for state in source(now_s)]
        for state in states:
            ring.state(state)
        if states and (worker := self._worker(now_s)) is not None:
            ring.state(worker)
        return bool(states)

    def close(self) -> None:
        ring, self._ring = self._ring, None
        if ring is not None:
            ring.close()


def _state(
    now_s: float, link: str, side: LinkSide, counts: tuple[int, int, int], ones: Sequence[MessageRecord]
) -> LinkState:
    """Return the state of one end with open messages, oldest first."""
    return LinkState(now_s, link, side, counts, len(ones), max(0.0, now_s - ones[0].taken_s), -1)


class Outbox:
    """Messages to one role that no link has taken yet."""

    def __init__(self, mine: str, role: Role, clock: Clock, flow: FlowRecorder) -> None:
        self._mine, self._clock, self._flow = mine, clock, flow
        self._link = link_name(mine, role)
        self._num_produced = self._num_sent = self._num_given_up = 0
        self._open: dict[MessageRecord, None] = {}
        """Oldest first."""
        flow.watch(self._states)

    def __len__(self) -> int:
        return len(self._open)

    def produced(self, chunk: TrajectoryChunk | None = None) -> MessageRecord:
        """Add a message; return its record."""
        self._num_produced += 1
        record = MessageRecord(None, self._clock.monotonic())
        if chunk is not None:
            record.chunk, record.size, record.policy_version = chunk.id, chunk.num_tokens, chunk.versions[-1]
        self._open[record] = None
        self._flow.opened()
        return record

    def sent(self, record: MessageRecord, worker: str) -> None:
        """End a message that the link to ``worker`` took."""
        self._num_sent += 1
        self._end(record, link_name(self._mine, worker), MessageOutcome.SENT)

    def given_up(self, record: MessageRecord) -> None:
        """End a message that no link took in time."""
        self._num_given_up += 1
        self._end(record, self._link, MessageOutcome.GIVEN_UP)

    def report(self) -> LinkReport | None:
        """Return the role's row for the heartbeat; None before the first message."""
        if not self._num_produced:
            return None
        oldest, now_s = next(iter(self._open), None), self._clock.monotonic()
        return LinkReport(
            name=self._link,
            produced=self._num_produced,
            # all links together refused these
            refused=self._num_given_up,
            open=len(self._open),
            oldest_age_s=0.0 if oldest is None else now_s - oldest.taken_s,
        )

    def _end(self, record: MessageRecord, link: str, outcome: MessageOutcome) -> None:
        del self._open[record]
        record.link = link
        self._flow.ended(record, outcome)

    def _states(self, now_s: float) -> Sequence[LinkState]:
        counts = (self._num_produced, self._num_sent, self._num_given_up)
        return [_state(now_s, self._link, LinkSide.SENDER, counts, [*self._open])] if self._open else []


class Inbox:
    """A worker's received messages until their end, and overdue work that the ledger gave it."""

    def __init__(self, mine: str, clock: Clock, flow: FlowRecorder) -> None:
        self._mine, self._clock, self._flow = mine, clock, flow
        self._counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
        """By link: received, done, stored."""
        self._open: dict[ChunkId, MessageRecord] = {}
        """Oldest first."""
        flow.watch(self._states)

    def __len__(self) -> int:
        return len(self._open)

    @property
    def since_s(self) -> float | None:
        """When the oldest open message was taken, by the monotonic clock; None without open messages."""
        return next((one.taken_s for one in self._open.values()), None)

    @property
    def num_waiting(self) -> int:
        """Open messages on which work has not begun."""
        return sum(one.begun_s is None for one in self._open.values())

    @property
    def num_storing(self) -> int:
        """Open messages whose result is on its way to the ledger."""
        return sum(one.done_s is not None for one in self._open.values())

    def took(
        self,
        chunk: ChunkId,
        sender: str = "",
        *,
        size: int = 0,
        policy_version: int = -1,
        span: str = "",
        facts: Mapping[str, str | int] = MappingProxyType({}),
        trace: str = "",
    ) -> None:
        """Take a message of ``sender``, or work from the ledger: see ``MessageRecord``.

        A repeat of an open message counts as done."""
        link = self._link_of(sender) if sender else ""
        self._count(link, "received")
        if chunk in self._open:
            self._count(link, "done")
            return
        now_s = self._clock.monotonic()
        self._open[chunk] = MessageRecord(chunk, now_s, link, size, policy_version, span, facts, trace)
        self._flow.opened()

    def passed(self, sender: str) -> None:
        """Count a message that needs no work here."""
        self._counts[self._link_of(sender)].update(("received", "done"))

    def begun(self, chunks: Iterable[ChunkId]) -> None:
        """Record the beginning of work on these."""
        now_s = self._clock.monotonic()
        for one in filter(None, map(self._open.get, chunks)):
            one.begun_s = now_s if one.begun_s is None else one.begun_s

    def done(self, chunk: ChunkId) -> None:
        """Record that the work on it is done and the result is to be stored."""
        one = self._open.get(chunk)
        if one is not None and one.done_s is None:
            one.done_s = self._clock.monotonic()
            self._count(one.link, "done")

    def stored(self, chunk: ChunkId) -> None:
        """End it, since the ledger has its result."""
        if chunk in self._open:
            self._count(self._open[chunk].link, "stored")
            self._end(chunk, MessageOutcome.STORED)

    def failed(self, chunk: ChunkId, error: str) -> None:
        """End it without a result; ``error`` says why in its span."""
        if chunk in self._open:
            self._open[chunk].error = error
            self._end(chunk, MessageOutcome.UNSTORED)

    def ended(self, chunks: Iterable[ChunkId]) -> None:
        """End those that are still open, without a result."""
        for chunk in chunks:
            if chunk in self._open:
                self._end(chunk, MessageOutcome.UNSTORED)

    def reports(self, stats: Iterable[LinkStats]) -> list[LinkReport]:
        """Return a report for each main sender, across its incarnations, and one for all others."""
        totals: defaultdict[str, Counter[str]] = defaultdict(Counter)
        for peer in stats:
            link = link_name(peer.peer.partition("#")[0], self._mine)
            totals[link].update(received=peer.num_messages, refused=peer.num_refused, gaps=peer.num_gaps)
        for link, counts in self._counts.items():
            totals[link].update(done=counts["done"], stored=counts["stored"])
        # the mailbox sums up the senders that it does not count by name
        others = link_name(OTHER_LINKS, self._mine)
        ranked = sorted(totals.keys() - {others}, key=lambda link: (-totals[link]["received"], link))
        for link in ranked[MAX_NAMED_LINKS:]:
            totals[others].update(totals.pop(link))
        oldest_s = dict[str, float]()
        for one in self._open.values():
            if one.link:
                link = one.link if one.link in totals else others
                totals[link]["open"] += 1
                oldest_s.setdefault(link, one.taken_s)
        now_s = self._clock.monotonic()
        return [
            LinkReport(name=link, oldest_age_s=now_s - oldest_s.get(link, now_s), **totals[link])
            for link in sorted(totals)
        ]

    def _link_of(self, sender: str) -> str:
        link = link_name(sender.partition("#")[0], self._mine)
        is_counted = link in self._counts or len(self._counts) < MAX_PEERS
        return link if is_counted else link_name(OTHER_LINKS, self._mine)

    def _count(self, link: str | None, what: str) -> None:
        # work of the ledger came by no link
        if link:
            self._counts[link][what] += 1

    def _end(self, chunk: ChunkId, outcome: MessageOutcome) -> None:
        self.done(chunk)
        self._flow.ended(self._open.pop(chunk), outcome)

    def _states(self, now_s: float) -> Sequence[LinkState]:
        links: defaultdict[str, list[MessageRecord]] = defaultdict(list)
        for one in self._open.values():
            links[one.link or ""].append(one)
        states = list[LinkState]()
        for link, ones in links.items():
            counts = self._counts.get(link, Counter())
            told = (counts["received"], counts["done"], counts["stored"])
            states.append(_state(now_s, link, LinkSide.RECEIVER, told, ones))
        return states
