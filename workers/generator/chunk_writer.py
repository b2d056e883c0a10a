"""Carries sampled windows to the ledger, and then to the scorers' mailboxes.

Windows come from a bounded queue. Each chunk is written to the ledger once, then sent to the
scorers that need it. The writer waits for the ledger, however long it is unreachable or full, and
for room in a scorer's mailbox. That wait is the back-pressure.

Counters in the heartbeat: ``chunks``, ``duplicates``, ``written_tokens``, ``refused_tokens`` (of
windows that the ledger no longer wanted), ``undelivered`` (left to the ledger's overdue index)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace

import msgspec
import numpy as np

from pipeline.config.schema import RunConfig
from pipeline.data.end_tokens import model_ends, response_texts
from pipeline.data.tokenizer import TextTokenizer
from pipeline.ledger.types import ChunkWrite, WriteStatus
from pipeline.runtime.context import ActorContext
from pipeline.runtime.message_record import MessageOutcome, MessageRecord
from pipeline.runtime.registry.contract import WaitingFor
from pipeline.runtime.retry import retry_while_full
from pipeline.runtime.role_sender import RoleSender
from pipeline.runtime.tracing import SAMPLE
from protocol.codec import Encoded, encode_once
from protocol.ids import ChunkId, Role, TrajectoryId
from protocol.trajectory import FinishReason, Segment, TrajectoryChunk
from workers.engines.generation.seam import SampledWindow
from workers.engines.generation.windows import text_to_stop
from workers.generator.held_trajectories import Held, HeldTrajectories

_NUM_WRITERS = 16
"""Chunks that wait for the ledger or a scorer at the same time."""
_POLL_S = 0.02
_DRAIN_SEND_S = 0.2
"""Limit of a send while draining, since the scorer may be draining too."""


class ChunkWriter:
    def __init__(
        self,
        ctx: ActorContext,
        held: HeldTrajectories,
        tokenizer: TextTokenizer,
        senders: Sequence[RoleSender],
        *,
        max_waiting: int,
    ) -> None:
        self._ctx = ctx
        self._held = held
        self._tokenizer = tokenizer
        self._senders = senders
        self._windows: asyncio.Queue[SampledWindow] = asyncio.Queue(maxsize=max_waiting)
        self._store_trouble = ""
        self._num_writing = 0

    def start(self) -> None:
        for number in range(_NUM_WRITERS):
            self._ctx.spawn(f"writer-{number}", self._write_windows())

    @property
    def num_unsent(self) -> int:
        """Sampled windows that are not stored and sent yet."""
        return self._windows.qsize() + self._num_writing

    @property
    def reaches_no_scorer(self) -> bool:
        """Whether all mailboxes of some role are unreachable from here."""
        return any(sender.is_cut_off for sender in self._senders)

    async def pass_on(self, window: SampledWindow) -> None:
        while self._windows.full():
            self.report_wait()
            await self._ctx.clock.sleep(_POLL_S)
        self._held.sampled(window)
        self._windows.put_nowait(window)

    async def join(self) -> None:
        await self._windows.join()

    def report_wait(self) -> None:
        if self._store_trouble:
            self._ctx.waiting_for(WaitingFor.LEDGER, self._store_trouble)
        else:
            self._ctx.waiting_for(WaitingFor.ROOM, "its chunks to be written")

    async def write(self, window: SampledWindow) -> None:
        """Write a SAMPLED window to the ledger and send it."""
        ctx, writing = self._ctx, self._held.start_writing(window.trajectory)
        if window.finish_reason is FinishReason.ABORT:
            self._ctx.count("refused_tokens", window.tokens.size)
            await self.let_go(writing)
            return
        chunk = chunk_of(writing, window, self._tokenizer, ctx.config, worker=str(ctx.who))
        encoded = encode_once(chunk)
        # read before the chunk is stored, so that the ledger's own deadline is not earlier
        due_s = ctx.clock.monotonic() + ctx.config.ledger.scoring_deadline_s
        outcome = await self._store(chunk, encoded)
        if outcome.status in (WriteStatus.STORED, WriteStatus.DUPLICATE):
            # a duplicate is a retry whose first answer was lost, so the chunk was not sent yet
            self._ctx.count("chunks" if outcome.status is WriteStatus.STORED else "duplicates")
            ctx.deliver()
            self._ctx.count("written_tokens", chunk.num_tokens)
            facts = {
                "chunk": str(chunk.id), "num_tokens": chunk.num_tokens, "finish_reason": str(chunk.finish_reason),
                "policy_versions": f"{chunk.versions[0]} to {chunk.versions[-1]}",
            }  # fmt: skip
            sampled = MessageRecord(chunk.id, writing.submitted_s, link=None, span=SAMPLE, facts=facts)
            trace = ctx.flow.ended(sampled, MessageOutcome.STORED)
            await self._deliver(chunk, replace(encoded, trace=trace), due_s)
        else:
            self._ctx.count("refused_tokens", chunk.num_tokens)
            begin = int(chunk.context_tokens.size)
            ctx.log.info(
                "chunk_not_stored", chunk=str(chunk.id), status=outcome.status, begin=begin, num_tokens=chunk.num_tokens
            )
        if outcome.keeps_lease and not ctx.draining.is_set():
            self._held.extend(writing, window.tokens)
        elif outcome.status is WriteStatus.FENCED:
            # Usually another generator has it by now. But a server that lost its last writes may
            # still count it as held here, at an earlier chunk.
            await self.let_go(writing)
        else:
            self._held.leave(writing)

    async def let_go(self, held: Held) -> None:
        """Release a trajectory to other generators; it never counts as wrong."""
        if self._held.leave(held):
            await self._ctx.ledger.give_back(self._ctx.who, (held.trajectory,))

    async def _write_windows(self) -> None:
        while True:
            window = await self._windows.get()
            self._num_writing += 1
            await self.write(window)
            self._num_writing -= 1
            self._windows.task_done()
            self._ctx.progress()

    async def _store(self, chunk: TrajectoryChunk, encoded: Encoded) -> ChunkWrite:
        """Write the chunk, retrying while the ledger is unreachable or full."""

        def on_wait(error: Exception) -> None:
            if not self._store_trouble:
                self._ctx.log.warning("chunk_write_delayed", chunk=str(chunk.id), reason=str(error))
            self._store_trouble = str(error)

        written = await retry_while_full(
            lambda: self._ctx.ledger.write_chunk(self._ctx.who, chunk, encoded),
            clock=self._ctx.clock,
            timeout_s=self._ctx.config.ledger.outage_timeout_s,
            on_wait=on_wait,
        )
        self._store_trouble = ""
        return written

    async def _deliver(self, chunk: TrajectoryChunk, encoded: Encoded, due_s: float) -> None:
        """Send the chunk to the mailboxes that need it.

        Without room in time it is left to the overdue index, from ``due_s`` on."""
        for sender in self._senders:
            if not _is_for(sender.role, chunk):
                continue
            timeout_s = _DRAIN_SEND_S if self._ctx.draining.is_set() else self._ctx.config.wire.send_timeout_s
            if not await sender.send(encoded, timeout_s=timeout_s, chunk=chunk, due_s=due_s):
                self._ctx.count("undelivered")


def _is_for(role: Role, chunk: TrajectoryChunk) -> bool:
    if role is Role.REWARD:
        return chunk.finish_reason.is_final
    if role is Role.ENVIRONMENT:
        return chunk.finish_reason is FinishReason.TURN
    return not (chunk.trajectory.is_evaluation or chunk.is_opening)


def opening_window(trajectory: TrajectoryId, policy_version: int) -> SampledWindow:
    """Return the window without tokens that asks the environment to begin a trajectory."""
    nothing = (np.empty(0, np.int32), np.empty(0, np.float32))
    return SampledWindow(trajectory, *nothing, (Segment(policy_version, 0),), FinishReason.TURN)


def chunk_of(
    held: Held, window: SampledWindow, tokenizer: TextTokenizer, config: RunConfig, *, worker: str
) -> TrajectoryChunk:
    """Return the chunk of a sampled window. A trajectory's last chunk carries the response's text; with an environment,
    one that ends a turn carries the turn's."""
    text = raw = None
    reason = window.finish_reason
    if config.has_environment and reason.is_final:
        reason = FinishReason.TURN
        turn = np.concatenate([held.response_tokens[held.turn_start :], window.tokens]).tolist()
        text, raw = response_texts(turn, tokenizer, model_ends(config.model.path, tokenizer))
    elif reason.is_final:
        tokens = np.concatenate([held.response_tokens, window.tokens]).tolist()
        text, raw = response_texts(tokens, tokenizer, model_ends(config.model.path, tokenizer))
        stop_strings = held.stop_strings(config)
        if stop_strings and window.finish_reason is FinishReason.STOP:
            whole, text = text, text_to_stop(text, stop_strings)
            # the search ignores special tokens, so the text to remove comes from the last, ordinary token
            raw = raw.removesuffix(whole[len(text) :])
    return TrajectoryChunk(
        id=ChunkId(window.trajectory, held.next_index),
        prompt=held.prompt,
        context_tokens=held.response_tokens,
        tokens=window.tokens,
        behavior_logprobs=window.behavior_logprobs,
        segments=window.segments,
        finish_reason=reason,
        response_text=text,
        worker=worker,
        created_s=time.time(),
        raw_text=msgspec.UNSET if raw is None or raw == text else raw,
        given=held.given or msgspec.UNSET,
        asked=held.asked or msgspec.UNSET,
    )
