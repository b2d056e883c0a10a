"""Sends messages to the mailboxes of one role.

A sender waits for room while every link of the role is full, or the role has no worker; that wait is the
back-pressure. It ends when a worker reads its mailbox, a worker joins, or the deadline passes. Unreachable
mailboxes are not waited for; the heartbeat names them.

Each message tries the links from a different one on, skipping full ones: equal workers get equal work, a slow
one gets less. To environments, all turns of a trajectory try the same link first, since its worker has the episode and
any other would play it again. A message that finds no room in time is left to the caller and the ledger's overdue index.

Chunks in the mailbox of a lost worker do not wait for their deadline: the ledger hands them out at once. A
worker is lost when its mailbox is gone from the registry, or has another address. A silent worker may come
back, and keeps its chunks."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final
from zlib import crc32

from pipeline.runtime.context import ActorContext
from pipeline.runtime.key_mirror import may_listen
from pipeline.runtime.liveness import UNREACHED_AFTER_S, UNREACHED_SAID_AFTER_S
from pipeline.runtime.notifications import LOOK_ANYWAY_S
from pipeline.runtime.registry.contract import MAX_NAMED_LINKS, OTHER_LINKS, LinkReport, Topic, WaitingFor, link_name
from protocol.channel import Sender
from protocol.codec import Encoded
from protocol.errors import ChannelClosed, LedgerFull, LedgerUnavailable
from protocol.ids import ChunkId, Role
from protocol.messages import Message
from protocol.trajectory import Field, TrajectoryChunk

_FIRST_PAUSE_S = 0.002
_LONGEST_PAUSE_S = 0.05
_AGAIN_S = 1.0
"""Pause after the ledger did not answer a read."""
_MAX_NAMED = 4
_MAX_SENT: Final = 4096
"""Newest chunks remembered per link: more than a mailbox and its worker hold."""
_FIELDS = {
    Role.REWARD: Field.REWARD,
    Role.REFERENCE: Field.REFERENCE,
    Role.VALUE: Field.VALUE,
    Role.ENVIRONMENT: Field.TURN,
}


@dataclass(slots=True)
class _Link:
    worker: str
    sender: Sender
    address: tuple[str, str]
    """Endpoint and key; if either changes, it is another mailbox."""
    sent: deque[tuple[float, ChunkId]] = field(default_factory=lambda: deque(maxlen=_MAX_SENT))
    """Each chunk, with the time (by the monotonic clock) at which the ledger hands it out by itself. From
    then on another worker may have it."""

    def chunks(self, now_s: float) -> tuple[ChunkId, ...]:
        """Return the chunks that only this mailbox has. Some may be scored already."""
        return tuple(chunk for due_s, chunk in self.sent if due_s > now_s)


class RoleSender:
    """Links to every live mailbox of one role. Several tasks of one loop may send."""

    def __init__(self, ctx: ActorContext, role: Role) -> None:
        self.role = role
        self._ctx = ctx
        self._links: dict[str, _Link] = {}
        self._left: dict[tuple[str, str], _Link] = {}
        """Closed links by address; their chunks may be lost."""
        self._refused: set[tuple[str, str]] = set()
        """Addresses of mailboxes without a link; see ``may_listen``."""
        self._turn = 0
        self._outbox = ctx.outbox(role)
        self._num_sent: dict[str, int] = {}
        ctx.watch_links(self.reports)

    @property
    def is_cut_off(self) -> bool:
        """Whether there are mailboxes, but all are unreachable."""
        return bool(self._links) and len(self._unreached(UNREACHED_AFTER_S)) == len(self._links)

    @property
    def workers(self) -> list[str]:
        return sorted(self._links)

    async def discover(self) -> None:
        """Keep the links in step with the role's live mailboxes, until cancelled. Spawn this once."""
        changed = self._ctx.notifications.subscribe(Topic.ENDPOINTS)
        try:
            while True:
                changed.clear()
                is_done = await self.refresh()
                await self._ctx.clock.wait(changed, LOOK_ANYWAY_S if is_done else _AGAIN_S)
        finally:
            self.close()

    async def refresh(self) -> bool:
        """Connect to new mailboxes, and disconnect from absent ones; while the ledger is down, change
        nothing. Returns whether everything is done."""
        try:
            is_done = self._connect(await self._ctx.registry.endpoints(self.role))
            if self._left:
                await self._hand_out(await self._ctx.registry.endpoints(self.role, silent=True))
        except (LedgerUnavailable, LedgerFull):
            return False
        return is_done

    def _connect(self, found: Mapping[str, tuple[str, str]]) -> bool:
        """Return whether there is a link to each mailbox. A key may arrive a second after its mailbox."""
        for worker in [name for name, link in self._links.items() if found.get(name) != link.address]:
            link = self._links.pop(worker)
            link.sender.close()
            self._left[link.address] = link
            self._ctx.log.info("link_closed", to=worker)
        new = {worker: address for worker, address in found.items() if worker not in self._links}
        peers = self._ctx.transport.peers() if new else None
        refused = {address for _, address in new.items() if not may_listen(address[1], self.role, peers)}
        for worker, address in new.items():
            endpoint, key = address
            if address not in refused:
                link = _Link(worker, self._ctx.transport.sender(endpoint, server_key=key), address)
                if (before := self._left.pop(address, None)) is not None:
                    link.sent = before.sent
                self._links[worker] = link
                self._ctx.log.info("link_opened", to=worker, endpoint=endpoint)
            elif address not in self._refused:
                why = f"its key belongs to no permitted host, or to a token of another role than {self.role}"
                self._ctx.log.warning("link_refused", to=worker, endpoint=endpoint, reason=why)
        self._refused = refused
        return not refused

    async def _hand_out(self, there: Mapping[str, tuple[str, str]]) -> None:
        """Have the ledger hand out the chunks of lost workers. ``there`` are all mailboxes, including those
        of silent workers."""
        for address, link in list(self._left.items()):
            chunks = link.chunks(self._ctx.clock.monotonic())
            if chunks and there.get(link.worker) == address:
                continue
            if chunks:
                num = await self._ctx.ledger.expire_scoring(self._ctx.who, _FIELDS[self.role], chunks)
                self._ctx.log.info("chunks_handed_out", sent_to=link.worker, chunks=num)
            del self._left[address]

    @property
    def num_waiting(self) -> int:
        """Messages that wait for a link with room."""
        return len(self._outbox)

    async def send(
        self,
        message: Message | Encoded,
        *,
        timeout_s: float,
        chunk: TrajectoryChunk | None = None,
        due_s: float = 0.0,
    ) -> bool:
        """Send to a link with room; return whether a link took it.

        Args:
            message: Encoded by the link, unless it is already.
            timeout_s: Longest wait for room.
            chunk: The chunk in the message, if any.
            due_s: When the ledger hands the chunk out by itself, by the monotonic clock."""
        record, link = self._outbox.produced(chunk), None
        try:
            link = await self._place(message, timeout_s, chunk)
        finally:
            if link is None:
                self._outbox.given_up(record)
            else:
                self._outbox.sent(record, link.worker)
        if link is not None and chunk is not None:
            link.sent.append((due_s, chunk.id))
        return link is not None

    async def _place(self, message: Message | Encoded, timeout_s: float, chunk: TrajectoryChunk | None) -> _Link | None:
        """Return the link that took the message; None when none did in time."""
        link = await self._offer(message, chunk)
        # waiting for unreachable mailboxes would be pointless
        if link is not None or self.is_cut_off:
            return link
        deadline = self._ctx.clock.monotonic() + timeout_s
        pause = _FIRST_PAUSE_S
        detail = f"{_named(self.workers)} to read" if self._links else f"a {self.role} worker to join"
        with self._ctx.waiting(WaitingFor.ROOM, detail):
            while (left := deadline - self._ctx.clock.monotonic()) > 0.0:
                await self._ctx.clock.sleep(min(pause, left))
                pause = min(2.0 * pause, _LONGEST_PAUSE_S)
                if (link := await self._offer(message, chunk)) is not None:
                    return link
        return None

    def reports(self) -> list[LinkReport]:
        """Return the heartbeat's reports: the first few links, and one for all others."""
        self._ctx.report_unreached(self.role, _in_words(self._unreached(UNREACHED_SAID_AFTER_S)))
        mine, workers = self._ctx.who.worker, self.workers
        named, others = workers[:MAX_NAMED_LINKS], workers[MAX_NAMED_LINKS:]
        links = [LinkReport(name=link_name(mine, name), sent=self._num_sent.get(name, 0)) for name in named]
        if others:
            num_sent = sum(self._num_sent.get(name, 0) for name in others)
            links.append(LinkReport(name=link_name(mine, OTHER_LINKS), sent=num_sent))
        of_role = self._outbox.report()
        return links if of_role is None else [*links, of_role]

    def close(self) -> None:
        for link in self._links.values():
            link.sender.close()
        self._links.clear()

    def _unreached(self, after_s: float) -> list[tuple[str, str, float]]:
        """Return name, address and seconds for each unreachable mailbox."""
        found = [(name, link.address[0], link.sender.unreached_s()) for name, link in sorted(self._links.items())]
        return [entry for entry in found if entry[2] >= after_s]

    async def _offer(self, message: Message | Encoded, chunk: TrajectoryChunk | None) -> _Link | None:
        """Try every link once without waiting, starting with the next one or the trajectory's; return the one that took
        the message."""
        workers = self.workers
        self._turn += 1
        first = self._turn
        if chunk is not None and self.role is Role.ENVIRONMENT:
            first = crc32(str(chunk.trajectory).encode())
        for place in range(len(workers)):
            worker = workers[(first + place) % len(workers)]
            link = self._links.get(worker)
            if link is None:  # closed while another link was tried
                continue
            try:
                took = await link.sender.send(message, timeout_s=0.0)
            except ChannelClosed:
                continue
            if took:
                self._num_sent[worker] = self._num_sent.get(worker, 0) + 1
                return link
        return None


def _in_words(unreached: list[tuple[str, str, float]]) -> str:
    if not unreached:
        return ""
    name, address, seconds = unreached[0]
    more = f" and {len(unreached) - 1} more" if len(unreached) > 1 else ""
    return unreached_words(name, address, seconds) + more


def unreached_words(name: str, address: str, seconds: float) -> str:
    """Describe an unreachable worker for the heartbeat; the text begins with its name."""
    return f"{name} at {address} (no answer for {seconds:.0f} s)"


def _named(workers: list[str]) -> str:
    more = f" and {len(workers) - _MAX_NAMED} more" if len(workers) > _MAX_NAMED else ""
    return " and ".join(workers[:_MAX_NAMED]) + more
