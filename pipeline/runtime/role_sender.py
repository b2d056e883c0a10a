"""Sends messages to the mailboxes of one role.

A sender waits for room when every link of the role is full, or the role has no worker. That wait is
the back-pressure. A worker that reads its mailbox ends it, or one that joins, or the deadline.
Unreachable mailboxes are not waited for; the heartbeat names them.

The first link to try changes with every message, and a full one is skipped: equal workers get equal
work, a slow one gets less. A message without room in time stays with the caller, and the ledger's
overdue index."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.runtime.context import ActorContext
from pipeline.runtime.liveness import UNREACHED_AFTER_S, UNREACHED_SAID_AFTER_S
from pipeline.runtime.notifications import LOOK_ANYWAY_S
from pipeline.runtime.open_messages import Parcel
from pipeline.runtime.registry.contract import MAX_NAMED_LINKS, OTHER_LINKS, LinkReport, Topic, WaitingFor, link_name
from protocol.channel import Sender
from protocol.codec import Encoded
from protocol.errors import ChannelClosed, LedgerFull, LedgerUnavailable
from protocol.ids import Role
from protocol.messages import Message

_FIRST_PAUSE_S = 0.002
_LONGEST_PAUSE_S = 0.05
_MAX_NAMED = 4
_PLAIN = Parcel()


@dataclass(slots=True)
class _Link:
    sender: Sender
    address: tuple[str, str]
    """Endpoint and key: a change of either is another mailbox."""


class RoleSender:
    """Links to every live mailbox of one role; several tasks of one loop may send."""

    def __init__(self, ctx: ActorContext, role: Role) -> None:
        self.role = role
        self._ctx = ctx
        self._links: dict[str, _Link] = {}
        self._turn = 0
        self._outbox = ctx.outbox(role)
        self._num_sent: dict[str, int] = {}
        ctx.watch_links(self.reports)

    @property
    def is_cut_off(self) -> bool:
        """Whether there are mailboxes, and all are unreachable."""
        return bool(self._links) and len(self._unreached(UNREACHED_AFTER_S)) == len(self._links)

    @property
    def workers(self) -> list[str]:
        """Names of the linked workers."""
        return sorted(self._links)

    async def discover(self) -> None:
        """Keep the links equal to the role's live mailboxes, until cancelled. Spawn this once."""
        changed = self._ctx.notifications.subscribe(Topic.ENDPOINTS)
        try:
            while True:
                changed.clear()
                await self.refresh()
                await self._ctx.clock.wait(changed, LOOK_ANYWAY_S)
        finally:
            self.close()

    async def refresh(self) -> None:
        """Connect to new mailboxes, and leave absent ones. While the ledger is away, change
        nothing."""
        try:
            found = await self._ctx.registry.endpoints(self.role)
        except (LedgerUnavailable, LedgerFull):
            return
        for worker in [name for name, link in self._links.items() if found.get(name) != link.address]:
            self._links.pop(worker).sender.close()
            self._ctx.log.info("link_closed", to=worker)
        for worker, address in found.items():
            if worker not in self._links:
                endpoint, key = address
                self._links[worker] = _Link(self._ctx.transport.sender(endpoint, server_key=key), address)
                self._ctx.log.info("link_opened", to=worker, endpoint=endpoint)

    @property
    def num_waiting(self) -> int:
        """Messages that wait for a link with room."""
        return len(self._outbox)

    async def send(self, message: Message | Encoded, *, timeout_s: float, parcel: Parcel = _PLAIN) -> bool:
        """Send to a link with room, waiting at most ``timeout_s``; return whether a
        link took it. ``parcel`` names the message in flow records."""
        number, worker = self._outbox.produced(), None
        try:
            worker = await self._place(message, timeout_s)
        finally:
            if worker is None:
                self._outbox.given_up(number, parcel)
            else:
                self._outbox.sent(number, worker, parcel)
        return worker is not None

    async def _place(self, message: Message | Encoded, timeout_s: float) -> str | None:
        """Return the worker whose link took the message; None when none did in time."""
        worker = await self._offer(message)
        # To wait for unreachable mailboxes would be in vain.
        if worker is not None or self.is_cut_off:
            return worker
        deadline = self._ctx.clock.monotonic() + timeout_s
        pause = _FIRST_PAUSE_S
        detail = f"{_named(self.workers)} to read" if self._links else f"a {self.role} worker to join"
        with self._ctx.waiting(WaitingFor.ROOM, detail):
            while (left := deadline - self._ctx.clock.monotonic()) > 0.0:
                await self._ctx.clock.sleep(min(pause, left))
                pause = min(2.0 * pause, _LONGEST_PAUSE_S)
                if (worker := await self._offer(message)) is not None:
                    return worker
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
        """Close every link at once."""
        for link in self._links.values():
            link.sender.close()
        self._links.clear()

    def _unreached(self, after_s: float) -> list[tuple[str, str, float]]:
        """Return name, address and seconds of unreachable mailboxes."""
        found = [(name, link.address[0], link.sender.unreached_s()) for name, link in sorted(self._links.items())]
        return [entry for entry in found if entry[2] >= after_s]

    async def _offer(self, message: Message | Encoded) -> str | None:
        """Try every link once without waiting, from the next link on; return whose took it."""
        workers = self.workers
        self._turn += 1
        for place in range(len(workers)):
            worker = workers[(self._turn + place) % len(workers)]
            link = self._links.get(worker)
            # Closed while another link was tried.
            if link is None:
                continue
            try:
                took = await link.sender.send(message, timeout_s=0.0)
            except ChannelClosed:
                continue
            if took:
                self._num_sent[worker] = self._num_sent.get(worker, 0) + 1
                return worker
        return None


def _in_words(unreached: list[tuple[str, str, float]]) -> str:
    if not unreached:
        return ""
    name, address, seconds = unreached[0]
    more = f" and {len(unreached) - 1} more" if len(unreached) > 1 else ""
    return unreached_words(name, address, seconds) + more


def unreached_words(name: str, address: str, seconds: float) -> str:
    """Return a heartbeat's words on an unreachable worker, which begin with its name."""
    return f"{name} at {address} (no answer for {seconds:.0f} s)"


def _named(workers: list[str]) -> str:
    """Return the first few names, and the number of others."""
    more = f" and {len(workers) - _MAX_NAMED} more" if len(workers) > _MAX_NAMED else ""
    return " and ".join(workers[:_MAX_NAMED]) + more
