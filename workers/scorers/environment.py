"""The environment worker: answers the model's turns.

Chunks that end a turn come from the mailbox, which generators fill, and overdue ones from the ledger. The user's
class runs in processes of its own (``pipeline.environments.processes``), up to ``environment.max_in_flight``
trajectories at once. The answer, a ``Turn``, is written to the ledger once; from then on any generator may
continue the trajectory, and one that has ended is scored. While a turn is answered, no generator holds its
trajectory.

All that matters travels with the chunks (``pipeline.environments.turns``), so another worker can go on after a crash.

A class that raises, hangs or returns nonsense is not a wrong answer: the failure is reported to the ledger with
its traceback, the turn is tried again, and after the allowed attempts it is a dead letter. A context that has no
room for another turn ends the trajectory as truncated, with its reward so far.

Counters in the heartbeat: ``scored`` (turns answered), ``failed`` (attempts), ``overdue``, ``duplicates``,
``turn_tokens`` (tokens of answers), ``episodes`` (trajectories that ended), ``truncated`` (of those, by a limit),
``clean``, ``bridged`` and ``new_segment`` (how the context of the next turn was made), and what the environment
counts (``Step.counts``)."""

from __future__ import annotations

from functools import partial
from typing import ClassVar

import msgspec

from pipeline.data.tokenizer import load_text_tokenizer
from pipeline.environments.processes import EnvironmentPool
from pipeline.environments.turns import TurnMaker
from pipeline.runtime.registry.contract import WaitingFor
from pipeline.runtime.role_sender import RoleSender
from protocol.errors import EnvironmentFailed
from protocol.ids import Role
from protocol.trajectory import Field, FinishReason, TrajectoryChunk
from workers.scorers.scorer import ConcurrentScorer

_DRAIN_SEND_S = 0.2
"""Limit of a send while draining, since the reward worker may be draining too."""


class Environment(ConcurrentScorer):
    role: ClassVar[Role] = Role.ENVIRONMENT
    field: ClassVar[Field] = Field.TURN

    async def setup(self) -> None:
        config = self.ctx.config
        self._section = config.environment
        self._pool = EnvironmentPool(self._section, partial(self.ctx.spawn, "environment", endless=False))
        self._turns = TurnMaker(config, load_text_tokenizer(config.model.path), self._pool)
        self._to_reward = RoleSender(self.ctx, Role.REWARD)
        self.ctx.starting("loading the environment")
        await self._pool.check()
        await super().setup()
        self.ctx.spawn("sender-reward", self._to_reward.discover())

    async def teardown(self) -> None:
        await self._pool.aclose()
        await super().teardown()

    def wants(self, chunk: TrajectoryChunk) -> bool:
        return chunk.finish_reason is FinishReason.TURN

    def report_wait(self) -> None:
        if self._in_flight:
            self.ctx.waiting_for(WaitingFor.COMPUTE, f"{len(self._in_flight)} trajectories in flight")
        else:
            super().report_wait()

    def room(self) -> int:
        return self._section.max_in_flight - len(self._in_flight)

    async def begin(self, chunks: list[TrajectoryChunk]) -> None:
        new = {chunk.id: chunk for chunk in chunks if chunk.id not in self._in_flight}
        if not new:
            return
        self._inbox.begun(new)
        if not self._in_flight:
            self.ctx.work.begin()
        self.move(set(new), set())
        for chunk in new.values():
            self.ctx.spawn("answering", self._answer_in_flight(chunk), endless=False)

    async def _answer_in_flight(self, chunk: TrajectoryChunk) -> None:
        try:
            await self._answer(chunk)
        finally:
            self.move(set(), {chunk.id})
            self._inbox.ended({chunk.id})
        self.ctx.progress()

    async def _answer(self, chunk: TrajectoryChunk) -> None:
        began_s = self.ctx.clock.monotonic()
        try:
            turn = await self._turns.answer(chunk)
        except EnvironmentFailed as error:
            await self.fail(chunk, str(error))
            return
        seconds = self.ctx.clock.monotonic() - began_s
        self.ctx.work.served("answering", seconds=seconds, size=turn.tokens.size, pieces=1)
        await self.write_all([(chunk, turn)])
        self.ctx.count("turn_tokens", turn.tokens.size)
        for name, number in turn.counts.items():
            self.ctx.count(name, number)
        if turn.is_done:
            self.ctx.count("episodes")
            self.ctx.count("truncated", turn.is_truncated)
            ended, ids = msgspec.structs.replace(chunk, turn=turn), (chunk.id,)
            # due since it has ended; the reward worker that gets it here need not share it
            await self.retry_while_full(lambda: self.ctx.ledger.extend_scoring(self.ctx.who, Field.REWARD, ids))
            due_s = self.ctx.clock.monotonic() + self.ctx.config.ledger.scoring_deadline_s
            timeout_s = _DRAIN_SEND_S if self.ctx.draining.is_set() else self.ctx.config.wire.send_timeout_s
            await self._to_reward.send(ended, timeout_s=timeout_s, chunk=ended, due_s=due_s)
