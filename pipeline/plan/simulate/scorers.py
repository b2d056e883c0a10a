"""The simulated workers of a role that writes a field: mailboxes of bounded links, and batches of what waits in them."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable

from pipeline.plan.costs import ScorerCosts
from pipeline.plan.simulate.clock import Clock
from pipeline.plan.simulate.ledger import Server, SimulatedLedger
from protocol.ids import ChunkId
from protocol.trajectory import Field

_Message = tuple[int, ChunkId, float, Field]
"""Sender, chunk, tokens to read, field."""


class _Worker:
    def __init__(self) -> None:
        self.waiting: deque[_Message] = deque()
        self.of_sender: Counter[int] = Counter()
        """Messages that wait, by sender: a link has room for so many."""
        self.num_busy = 0


class ScorerPool:
    """All workers of one role.

    A sender tries them in turn, skipping full links, as in ``pipeline.runtime.role_sender``; if all are full it waits."""

    def __init__(
        self,
        clock: Clock,
        costs: ScorerCosts,
        ledger: SimulatedLedger,
        server: Server,
        field: Field,
        *,
        num_workers: int,
        max_batch: int,
        link_room: int,
    ) -> None:
        self._clock, self._costs, self._ledger, self._server, self._field = clock, costs, ledger, server, field
        self._workers = [_Worker() for _ in range(num_workers)]
        self._max_batch, self._link_room = max_batch, link_room
        self._turn = 0
        self._blocked: dict[int, deque[tuple[_Message, Callable[[], None]]]] = defaultdict(deque)
        """By sender: each has room of its own."""
        self.busy_s = 0.0
        self.after: ScorerPool | None = None
        """Gets a response once this pool has written its reward, if guidance follows that."""

    @property
    def num_servers(self) -> int:
        return len(self._workers) * self._costs.concurrency

    @property
    def depth(self) -> int:
        """Messages that wait, in mailboxes or for room in one."""
        return sum(len(worker.waiting) for worker in self._workers) + sum(map(len, self._blocked.values()))

    def send(self, sender: int, chunk: ChunkId, num_tokens: float, sent: Callable[[], None]) -> None:
        """Put a chunk into a mailbox; ``sent`` is called once one has room."""
        message = (sender, chunk, num_tokens, self._field)
        if self._offer(message):
            sent()
        else:
            self._blocked[sender].append((message, sent))

    def add(self, message: _Message) -> None:
        """Give a chunk that comes from the ledger, whose queue has no limit."""
        self._turn += 1
        worker = self._workers[self._turn % len(self._workers)]
        worker.waiting.append(message)
        self._serve(worker)

    def _offer(self, message: _Message) -> bool:
        self._turn += 1
        for place in range(len(self._workers)):
            worker = self._workers[(self._turn + place) % len(self._workers)]
            if worker.of_sender[message[0]] < self._link_room:
                worker.of_sender[message[0]] += 1
                worker.waiting.append(message)
                self._serve(worker)
                return True
        return False

    def _serve(self, worker: _Worker) -> None:
        free = self._costs.concurrency - worker.num_busy
        if not free or not worker.waiting:
            return
        num = min(self._max_batch, -(-len(worker.waiting) // free))
        batch = [worker.waiting.popleft() for _ in range(num)]
        seconds = self._costs.batch_s(len(batch), sum(tokens for _, _, tokens, _ in batch))
        worker.num_busy += 1
        self.busy_s += seconds
        # a worker begins its next batch when the last one is written
        self._clock.after(seconds + self._server.reply_s(), lambda: self._written(worker, batch))
        for sender, *_ in batch:
            worker.of_sender[sender] = max(0, worker.of_sender[sender] - 1)
            if blocked := self._blocked.get(sender):
                message, sent = blocked.popleft()
                self._offer(message)
                sent()

    def _written(self, worker: _Worker, batch: list[_Message]) -> None:
        worker.num_busy -= 1
        for sender, chunk, num_tokens, field in batch:
            self._ledger.score(chunk, field)
            if self.after is not None:
                self.after.add((sender, chunk, num_tokens, Field.GUIDANCE))
        self._serve(worker)
