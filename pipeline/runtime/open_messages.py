"""Tracks the open messages at each end of a worker's links.

An *outbox* has the messages to a role from their creation until a link takes them. An *inbox* has received
messages until the ledger has their result::

    outbox   produced ──> sent, or given up
    inbox    received ──> begun ──> done ──> stored, or ended without a result

So ``produced >= sent`` and ``received >= done >= stored``. Ages are by this process's monotonic clock. The
caller limits how many messages are open, and ends every one that it took."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field

from pipeline.runtime.clock import Clock
from pipeline.runtime.flow_ring import Completion, FlowRingWriter, LinkSide, LinkState, MessageOutcome, key_of
from pipeline.runtime.notifications import LOOK_ANYWAY_S
from pipeline.runtime.registry.contract import MAX_NAMED_LINKS, OTHER_LINKS, LinkReport, link_name
from protocol.channel import LinkStats
from protocol.ids import Role
from protocol.inbound import MAX_PEERS

STATES_EVERY_S = 0.1


class FlowRecorder:
    """Writes a worker's flow records to its ring (``pipeline.runtime.flow_ring``), if it has one.

    Inboxes and outboxes report to it. Each message gets a completion; states are recorded every 100 ms while
    a message is open. Used only by the main loop."""

    def __init__(self, clock: Clock, ring: FlowRingWriter | None = None) -> None:
        self._clock, self._ring = clock, ring
        self._sources: list[Callable[[float], Sequence[LinkState]]] = []
        self._worker: Callable[[float], LinkState | None] = lambda _: None
        self._opened = asyncio.Event()

    @property
    def is_on(self) -> bool:
        return self._ring is not None

    def watch(self, states: Callable[[float], Sequence[LinkState]]) -> None:
        """Record ``states(now_s)``, the ends with open messages, while there are any."""
        self._sources.append(states)

    def watch_worker(self, state: Callable[[float], LinkState]) -> None:
        self._worker = state

    def opened(self) -> None:
        """Start recording states."""
        self._opened.set()

    def complete(self, done: Completion) -> None:
        if self._ring is not None:
            self._ring.complete(done)

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


def state_of(
    now_s: float, link: str, end: LinkSide, counts: tuple[int, int, int], since_s: Sequence[float]
) -> LinkState | None:
    """Return the state of one end whose open messages date from ``since_s``; None if there are none."""
    if not since_s:
        return None
    return LinkState(now_s, link, end, counts, len(since_s), max(0.0, now_s - min(since_s)), -1)


@dataclass(frozen=True, slots=True)
class Parcel:
    """How flow records identify a message."""

    name: str = ""
    """Its chunk's name, the same at both ends."""
    size: int = 0
    """Expected work in tokens."""
    policy_version: int = -1
    """The newest version that sampled it."""


_PLAIN = Parcel()


class Outbox:
    """Messages to one role that no link has taken yet."""

    def __init__(self, mine: str, role: Role, clock: Clock, flow: FlowRecorder) -> None:
        self._mine, self._clock, self._flow = mine, clock, flow
        self._link = link_name(mine, role)
        self._num_produced = self._num_sent = self._num_given_up = 0
        self._since_s: dict[int, float] = {}
        flow.watch(self._states)

    def __len__(self) -> int:
        return len(self._since_s)

    def produced(self) -> int:
        """Add a message; return its number."""
        self._num_produced += 1
        self._since_s[self._num_produced] = self._clock.monotonic()
        self._flow.opened()
        return self._num_produced

    def sent(self, number: int, worker: str, parcel: Parcel = _PLAIN) -> None:
        """End a message that the link to ``worker`` took."""
        self._num_sent += 1
        self._end(number, link_name(self._mine, worker), MessageOutcome.SENT, parcel)

    def given_up(self, number: int, parcel: Parcel = _PLAIN) -> None:
        """End a message that no link took in time."""
        self._num_given_up += 1
        self._end(number, self._link, MessageOutcome.GIVEN_UP, parcel)

    def report(self) -> LinkReport | None:
        """Return the role's row for the heartbeat; None before the first message."""
        if not self._num_produced:
            return None
        oldest_s, now_s = min(self._since_s.values(), default=None), self._clock.monotonic()
        return LinkReport(
            name=self._link,
            produced=self._num_produced,
            # all links together refused these
            refused=self._num_given_up,
            open=len(self._since_s),
            oldest_age_s=0.0 if oldest_s is None else now_s - oldest_s,
        )

    def _end(self, number: int, link: str, outcome: MessageOutcome, parcel: Parcel) -> None:
        since_s = self._since_s.pop(number)
        if self._flow.is_on:
            now_s = self._clock.monotonic()
            self._flow.complete(
                Completion(
                    *(now_s, link, outcome, key_of(parcel.name), parcel.size, now_s - since_s),
                    *(0.0, 0.0, parcel.policy_version),
                )
            )

    def _states(self, now_s: float) -> Sequence[LinkState]:
        counts = (self._num_produced, self._num_sent, self._num_given_up)
        state = state_of(now_s, self._link, LinkSide.SENDER, counts, list(self._since_s.values()))
        return () if state is None else (state,)


@dataclass(slots=True)
class _Counts:
    link: str
    received: int = 0
    done: int = 0
    stored: int = 0


@dataclass(slots=True)
class _Open:
    """A received message that has not ended."""

    counts: _Counts | None
    """The sender's counts; None for work that came from the ledger."""
    parcel: Parcel
    taken_s: float
    begun_s: float | None = None
    done_s: float | None = None


@dataclass(slots=True)
class _Sums:
    received: int = 0
    refused: int = 0
    gaps: int = 0
    done: int = 0
    stored: int = 0
    since_s: list[float] = field(default_factory=list[float])

    def add(self, other: _Sums) -> None:
        for name in ("received", "refused", "gaps", "done", "stored"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.since_s += other.since_s


class Inbox:
    """A worker's received messages until their end, and overdue work that the ledger gave it."""

    def __init__(self, mine: str, clock: Clock, flow: FlowRecorder) -> None:
        self._mine, self._clock, self._flow = mine, clock, flow
        self._counts: dict[str, _Counts] = {}
        self._open: dict[Hashable, _Open] = {}
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

    def took(self, key: Hashable, sender: str = "", parcel: Parcel = _PLAIN) -> None:
        """Take a message of ``sender``, or work from the ledger. A repeat of an open message counts as done."""
        counts = self._of(sender) if sender else None
        if counts is not None:
            counts.received += 1
        if key in self._open:
            if counts is not None:
                counts.done += 1
            return
        self._open[key] = _Open(counts, parcel, self._clock.monotonic())
        self._flow.opened()

    def passed(self, sender: str) -> None:
        """Count a message that needs no work here."""
        counts = self._of(sender)
        counts.received += 1
        counts.done += 1

    def begun(self, keys: Iterable[Hashable]) -> None:
        """Record the beginning of work on these."""
        now_s = self._clock.monotonic()
        for one in filter(None, map(self._open.get, keys)):
            one.begun_s = now_s if one.begun_s is None else one.begun_s

    def done(self, key: Hashable) -> None:
        """Record that the work on it is done and the result is to be stored."""
        one = self._open.get(key)
        if one is not None and one.done_s is None:
            one.done_s = self._clock.monotonic()
            if one.counts is not None:
                one.counts.done += 1

    def stored(self, key: Hashable) -> None:
        """End it, since the ledger has its result."""
        self.done(key)
        one = self._open.pop(key, None)
        if one is not None:
            if one.counts is not None:
                one.counts.stored += 1
            self._record(one, MessageOutcome.STORED)

    def ended(self, keys: Iterable[Hashable]) -> None:
        """End those that are still open, without a result."""
        for key in keys:
            self.done(key)
            one = self._open.pop(key, None)
            if one is not None:
                self._record(one, MessageOutcome.UNSTORED)

    def reports(self, stats: Iterable[LinkStats]) -> list[LinkReport]:
        """Return a report for each main sender, across its incarnations, and one for all others."""
        totals: dict[str, _Sums] = {}
        for link in stats:
            sums = totals.setdefault(link_name(link.peer.partition("#")[0], self._mine), _Sums())
            sums.add(_Sums(link.num_messages, link.num_refused, link.num_gaps))
        for counts in self._counts.values():
            totals.setdefault(counts.link, _Sums()).add(_Sums(done=counts.done, stored=counts.stored))
        for one in self._open.values():
            if one.counts is not None:
                totals[one.counts.link].since_s.append(one.taken_s)
        # the mailbox sums up the senders that it does not count by name
        others = link_name(OTHER_LINKS, self._mine)
        ranked = sorted(totals.keys() - {others}, key=lambda name: (-totals[name].received, name))
        for name in ranked[MAX_NAMED_LINKS:]:
            totals.setdefault(others, _Sums()).add(totals.pop(name))
        now_s = self._clock.monotonic()
        return [_report(name, totals[name], now_s) for name in sorted(totals)]

    def _of(self, sender: str) -> _Counts:
        name = sender.partition("#")[0]
        if name not in self._counts and len(self._counts) >= MAX_PEERS:
            name = OTHER_LINKS
        counts = self._counts.get(name)
        if counts is None:
            counts = self._counts[name] = _Counts(link_name(name, self._mine))
        return counts

    def _record(self, one: _Open, outcome: MessageOutcome) -> None:
        if not self._flow.is_on:
            return
        now_s = self._clock.monotonic()
        done_s = now_s if one.done_s is None else one.done_s
        begun_s = done_s if one.begun_s is None else one.begun_s
        self._flow.complete(
            Completion(
                *(now_s, one.counts.link if one.counts else "", outcome, key_of(one.parcel.name), one.parcel.size),
                *(begun_s - one.taken_s, done_s - begun_s, now_s - done_s, one.parcel.policy_version),
            )
        )

    def _states(self, now_s: float) -> Sequence[LinkState]:
        ends: dict[str, tuple[_Counts, list[float]]] = {}
        for one in self._open.values():
            counts = one.counts or _OVERDUE
            ends.setdefault(counts.link, (counts, []))[1].append(one.taken_s)
        told = [
            state_of(now_s, link, LinkSide.RECEIVER, (counts.received, counts.done, counts.stored), since_s)
            for link, (counts, since_s) in ends.items()
        ]
        return [state for state in told if state is not None]


_OVERDUE = _Counts("")
"""Counts for work that came from the ledger."""


def _report(name: str, sums: _Sums, now_s: float) -> LinkReport:
    return LinkReport(
        name=name,
        received=sums.received,
        done=sums.done,
        refused=sums.refused,
        gaps=sums.gaps,
        stored=sums.stored,
        open=len(sums.since_s),
        oldest_age_s=now_s - min(sums.since_s) if sums.since_s else 0.0,
    )
