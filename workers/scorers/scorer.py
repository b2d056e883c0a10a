"""What reward, reference and value workers share: mailbox, overdue index, and writes that a repeat
does not change.

Chunks come from the mailbox. Chunks whose deadline has passed come from the ledger: their message
was lost with a dead process, or a mailbox was full for too long. Each chunk gets one field. Nothing
depends on a message arriving: the wire is fast, the ledger is durable."""

from __future__ import annotations

import abc
import asyncio
import re
from collections.abc import Awaitable, Callable, Iterable
from typing import ClassVar, TypeVar

from structlog.typing import FilteringBoundLogger

from pipeline.ledger.stored import with_turn
from pipeline.ledger.types import WriteStatus
from pipeline.process.work import TOKENS
from pipeline.runtime.actor import Actor
from pipeline.runtime.context import ActorContext, WorkInHand
from pipeline.runtime.registry.contract import WaitingFor
from pipeline.runtime.retry import retry_while_full
from protocol.endpoints import mailbox_endpoint
from protocol.ids import ChunkId
from protocol.log_limiter import LogLimiter
from protocol.trajectory import Field, Score, TrajectoryChunk, field_of

T = TypeVar("T")

RECEIVE_TIMEOUT_S = 0.25
_OVERDUE_EVERY_S = 1.0
_GIST_CHARS = 200


class Scorer(Actor):
    field: ClassVar[Field]
    max_batch: int = 64
    _next_overdue_s: float = 0.0

    def __init__(self, ctx: ActorContext) -> None:
        super().__init__(ctx)
        self._log_limiter = LogLimiter(ctx.clock.monotonic)

    def wants(self, chunk: TrajectoryChunk) -> bool:
        return True

    def size_of(self, chunk: TrajectoryChunk) -> int:
        """Return the tokens to be read, which the time of a chunk's work should follow."""
        return int(chunk.prompt.tokens.size + chunk.context_tokens.size + chunk.tokens.size)

    async def setup(self) -> None:
        endpoint = mailbox_endpoint(self.ctx.config.wire, self.ctx.run_dir, self.ctx.who)
        self._mailbox = self.ctx.transport.mailbox(endpoint)
        self._inbox = self.ctx.watch_mailbox(self._mailbox)
        self.ctx.watch_in_hand(
            lambda: WorkInHand(self._inbox.since_s, self._inbox.num_waiting, self._inbox.num_storing)
        )
        await self.ctx.registry.set_endpoint(
            self.ctx.who, self._mailbox.endpoint, public_key=self.ctx.transport.public_key
        )

    async def run(self) -> None:
        while not self.ctx.draining.is_set():
            await self.serve()

    @abc.abstractmethod
    async def serve(self, timeout_s: float = RECEIVE_TIMEOUT_S) -> int:
        """Take chunks that arrive within ``timeout_s``, and at times overdue ones; return how many."""

    async def receive_chunks(self, timeout_s: float, room: int) -> list[TrajectoryChunk]:
        """Return up to ``room`` chunks that arrive within ``timeout_s`` or are overdue."""
        batch = await self.receive(timeout_s, room)
        now = self.ctx.clock.monotonic()
        if len(batch) < room and now >= self._next_overdue_s:
            self._next_overdue_s = now + _OVERDUE_EVERY_S
            batch += await self._overdue(room - len(batch))
        return batch

    async def teardown(self) -> None:
        self._mailbox.close()

    async def write_all(self, scored: Iterable[tuple[TrajectoryChunk, Score]]) -> None:
        """Write the scores of chunks, all at once; a repeat changes nothing."""
        async with asyncio.TaskGroup() as tasks:
            for chunk, score in scored:
                tasks.create_task(self._write(chunk, score))

    async def _write(self, chunk: TrajectoryChunk, score: Score) -> None:
        self._inbox.done(chunk.id)
        status = await self.retry_while_full(lambda: self.ctx.ledger.write_score(self.ctx.who, chunk.id, score))
        self._inbox.stored(chunk.id)
        field = field_of(score)
        if status is WriteStatus.STORED:
            # a reference worker writes two fields
            self.ctx.count("scored" if field is self.field else "guided")
        else:
            self.ctx.count("duplicates")
        self.ctx.deliver()

    async def fail(self, chunk: TrajectoryChunk, error: str, field: Field | None = None) -> bool:
        """Report that a chunk could not be scored; return whether it is now a dead letter.

        ``error`` is a traceback, and ``field`` the role's by default. Similar errors are logged
        once a minute; all are counted, and those of dead letters are in the ledger."""
        of = self.field if field is None else field
        is_dead = await self.retry_while_full(lambda: self.ctx.ledger.fail_score(self.ctx.who, chunk.id, of, error))
        self.ctx.count("failed")
        # only the error's type, as its message may quote a response
        self._inbox.failed(chunk.id, _gist(error).partition(":")[0])
        if (log := self._log_of(error, "dead letter" if is_dead else "failed")) is not None:
            log.warning("scoring_failed", chunk=str(chunk.id), dead_letter=is_dead, error=error)
        return is_dead

    async def retry_while_full(self, call: Callable[[], Awaitable[T]]) -> T:
        return await retry_while_full(
            call,
            clock=self.ctx.clock,
            timeout_s=self.ctx.config.ledger.outage_timeout_s,
            on_wait=lambda error: self.ctx.waiting_for(WaitingFor.LEDGER, str(error)),
        )

    async def receive(self, timeout_s: float, room: int) -> list[TrajectoryChunk]:
        """Wait for one message, then take all that are waiting, up to ``room``."""
        self.report_wait()
        batch: list[TrajectoryChunk] = []
        while len(batch) < room:
            delivery = await self._mailbox.receive(timeout_s=timeout_s)
            if delivery is None:
                break
            timeout_s = 0.0
            chunk = delivery.message
            if isinstance(chunk, TrajectoryChunk) and self.wants(chunk):
                self._take(chunk, self.field, delivery.sender, delivery.trace)
                batch.append(chunk)
            else:
                self._inbox.passed(delivery.sender)
        return batch

    def report_wait(self) -> None:
        self.ctx.waiting_for(WaitingFor.INPUT, "its mailbox")

    async def _overdue(self, room: int) -> list[TrajectoryChunk]:
        given = await self.ctx.ledger.overdue(self.ctx.who, self.field, max_chunks=room)
        chunks = [with_turn(one) for one in given]
        if chunks:
            self.ctx.count("overdue", len(chunks))
        for chunk in chunks:
            self._take(chunk, self.field)
        return chunks

    def _log_of(self, why: str, kind: str) -> FilteringBoundLogger | None:
        """Return the log, or None if a similar error was logged within a minute."""
        num_silent = self._log_limiter.due(_gist(why), kind)
        if num_silent is None:
            return None
        return self.ctx.log.bind(num_not_logged=num_silent) if num_silent else self.ctx.log

    def _take(self, chunk: TrajectoryChunk, field: Field, sender: str = "", trace: str = "") -> None:
        self._inbox.took(
            chunk.id,
            sender,
            size=self.size_of(chunk),
            policy_version=chunk.versions[-1],
            span=str(field),
            facts={"chunk": str(chunk.id)},
            trace=trace,
        )


class BatchScorer(Scorer):
    @abc.abstractmethod
    async def score(self, chunks: list[TrajectoryChunk]) -> None:
        """Compute the field for a batch; each chunk must end with ``write_all`` or ``fail``."""

    def amount(self, chunks: list[TrajectoryChunk]) -> tuple[float, str]:
        """Return the amount of a batch's work, and its unit."""
        return float(sum(map(self.size_of, chunks))), TOKENS

    async def serve(self, timeout_s: float = RECEIVE_TIMEOUT_S) -> int:
        batch = await self.receive_chunks(timeout_s, self.max_batch)
        if batch:
            self.ctx.waiting_for(WaitingFor.COMPUTE)
            self.ctx.held = len(batch)
            await self._score(batch)
            self.ctx.held = 0
            self.ctx.progress(len(batch))
        return len(batch)

    async def drain(self) -> None:
        """Score the chunks that are in the mailbox, for at most half of the drain; senders may
        continue."""
        until_s = self.ctx.clock.monotonic() + self.ctx.config.supervisor.drain_timeout_s / 2
        while self.ctx.clock.monotonic() < until_s and (batch := await self.receive(0.0, self.max_batch)):
            await self._score(batch)

    async def _score(self, batch: list[TrajectoryChunk]) -> None:
        keys = [chunk.id for chunk in batch]
        self._inbox.begun(keys)
        try:
            with self.ctx.work.task("scoring", *self.amount(batch), pieces=len(batch)):
                await self.score(batch)
        finally:
            self._inbox.ended(keys)


class ConcurrentScorer(Scorer):
    """A scorer whose chunks wait for something outside of this process: each is judged in a task of its own, and
    meanwhile its deadline in the ledger is extended, so that no other worker judges it too."""

    async def setup(self) -> None:
        self._in_flight: set[ChunkId] = set()
        self._freed = asyncio.Event()
        await super().setup()

    async def run(self) -> None:
        self.ctx.spawn("deadlines", self._extend_deadlines())
        await super().run()

    @abc.abstractmethod
    def room(self) -> int:
        """Return how many chunks may be taken now."""

    @abc.abstractmethod
    async def begin(self, chunks: list[TrajectoryChunk]) -> None:
        """Start judging chunks; each is in flight (``move``) until it is written or reported as failed."""

    async def serve(self, timeout_s: float = RECEIVE_TIMEOUT_S) -> int:
        """Start judging chunks that arrive, and overdue ones; without room, wait. Returns how many."""
        room = self.room()
        if room <= 0:
            await self._wait_for_end(timeout_s)
            return 0
        batch = await self.receive_chunks(timeout_s, room)
        await self.begin(batch)
        return len(batch)

    async def drain(self) -> None:
        """Judge what is in the mailbox, for at most half of the drain; the rest becomes overdue."""
        until_s = self.ctx.clock.monotonic() + self.ctx.config.supervisor.drain_timeout_s / 2
        more = True
        while (more or self._in_flight) and self.ctx.clock.monotonic() < until_s:
            if more and (room := self.room()) > 0:
                batch = await self.receive(0.0, room)
                await self.begin(batch)
                more = bool(batch)
            elif self._in_flight:
                await self._wait_for_end(RECEIVE_TIMEOUT_S)
            else:
                break

    def move(self, begun: set[ChunkId], ended: set[ChunkId]) -> None:
        self._in_flight = (self._in_flight - ended) | begun
        self.ctx.held = len(self._in_flight)
        self._freed.set()

    async def _wait_for_end(self, timeout_s: float) -> None:
        self._freed.clear()
        self.report_wait()
        await self.ctx.clock.wait(self._freed, timeout_s)

    async def _extend_deadlines(self) -> None:
        while True:
            await self.ctx.clock.sleep(self.ctx.config.ledger.scoring_deadline_s / 3)
            if self._in_flight:
                await self.ctx.ledger.extend_scoring(self.ctx.who, self.field, tuple(self._in_flight))


def _gist(error: str) -> str:
    """Return a traceback's last line without numbers, so that errors with the same cause are equal."""
    return re.sub(r"\d+", "#", error.rstrip().rpartition("\n")[2][:_GIST_CHARS])
