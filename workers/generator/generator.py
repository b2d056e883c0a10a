"""The generator: prompts with credit in, chunks out.

*Consumes* leases from the ledger (new groups, or trajectories that nobody holds) and published weights. *Produces* chunks:
each is written to the ledger once, and from then on no process that dies can lose it; then it goes to the scorers' mailboxes.
*Waits for* credit (the learner settles or drops) and for room in a scorer's mailbox (the scorer reads): that wait is the
back-pressure.

Two loops share the process. The *decode* loop leases, feeds the engine and swaps weights; it alone touches the engine, on
the compute thread. New weights are brought here and verified beside it (``workers.generator.weight_receiver``). The
*writers* carry finished windows to the ledger and the wire while the engine goes on, and hand back those that may be
extended. Between them are two bounded queues.

Counters in the heartbeat: ``sampled_tokens``, of which ``written_tokens`` are in the ledger and ``refused_tokens`` were of
windows that it did not want any more (after a drain nothing is left between them); ``prefill_tokens``, ``decode_steps``,
``turns``, ``decode_s`` (seconds in the engine), ``live``, ``chunks``, ``undelivered`` (left to the ledger's overdue index);
those of the weights are told in ``workers.generator.weight_receiver``.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from pipeline.config.ledger_spec import ledger_spec
from pipeline.config.schema import declaration
from pipeline.data.source import PromptSource
from pipeline.data.tokenizer import load_text_tokenizer
from pipeline.ledger.contract import ChunkWrite, Lease, Refusal, WriteStatus
from pipeline.observability.regenerated_tokens import Tally
from pipeline.preflight.model_folder import loading
from pipeline.process import work
from pipeline.process.work import TIMES_SLOWEST
from pipeline.runtime.actor import Actor, ActorContext
from pipeline.runtime.registry.contract import WaitingFor, unreached_workers
from pipeline.runtime.retry import ride_out
from pipeline.runtime.role_sender import Outbox
from pipeline.weights import TURNS
from protocol.codec import Encoded, encode_once
from protocol.errors import EngineDied, ParityFailed, WeightsDamaged, WeightsRejected
from protocol.ids import ChunkId, Role, TrajectoryId
from protocol.trajectory import FinishReason, Prompt, TrajectoryChunk
from workers.engines.build import build_generation_engine
from workers.engines.generation.seam import GenerationEngine, SamplingParams, Window, WindowRequest
from workers.generator.backoff import Backoff
from workers.generator.weight_receiver import WeightsTaker

_NUM_WRITERS = 16
"""Chunks that wait for the ledger or a scorer at the same time."""
_IDLE_S = 0.02
_LONGEST_REFUSAL_S = 0.1
_GIVE_UP_S = 5.0
_LOOK_AROUND_S = 1.0
_SILENT_AFTER_S = 5.0
"""A generator without a heartbeat for so long does nobody's work."""
_DRAIN_SEND_S = 0.2
"""While draining nobody is kept waiting for a scorer that may be draining too."""

_REFUSALS = {
    Refusal.NO_CREDIT: "the learner to settle or drop work: sampling is as far ahead as staleness allows",
    Refusal.EXHAUSTED: "nothing: every prompt is admitted",
    Refusal.BEHIND: "the published weights",
    Refusal.MEMORY: "the ledger to shrink below its watermark",
    Refusal.CLOSED: "nothing: admission is closed",
}


@dataclass(frozen=True, slots=True)
class _Held:
    """A leased trajectory: what the next chunk needs to know."""

    lease: Lease
    prompt: Prompt
    response_tokens: np.ndarray
    """int32 [tokens of the chunks before the next one]"""
    next_index: int


class Generator(Actor):
    """Samples trajectories window by window."""

    role: ClassVar[Role] = Role.GENERATOR

    def __init__(self, ctx: ActorContext) -> None:
        super().__init__(ctx)
        self._held: dict[TrajectoryId, _Held] = {}
        self._unwritten: set[TrajectoryId] = set()
        """Submitted to the engine, and no writer has taken the window yet."""
        self._ended: set[TrajectoryId] = set()
        """Their last window is being written."""
        self._store_trouble = ""
        self._outboxes: list[Outbox] = []
        self._next_look_around = 0.0
        self._others_reach = False
        self._credit = Backoff(least_s=_IDLE_S, most_s=_LONGEST_REFUSAL_S)

    async def setup(self) -> None:
        """Read prompts, join the ledger, build the engine and take the first weights."""
        config = self.ctx.config
        self._tokenizer = load_text_tokenizer(config.model.path)
        self.ctx.starting("reading prompts")
        self._source = await self.ctx.compute(PromptSource.load, config, self._tokenizer)
        await self.ctx.replay.open(ledger_spec(config, self._source))
        self.ctx.starting(loading(config.model.path))
        self._engine: GenerationEngine = await self.ctx.compute(build_generation_engine, config)
        self._finished: asyncio.Queue[Window] = asyncio.Queue(maxsize=2 * self._engine.num_slots)
        self._resumed: asyncio.Queue[TrajectoryId] = asyncio.Queue(maxsize=4 * self._engine.num_slots)
        self._tally = Tally(self.ctx.run_dir, self.ctx.who)
        self._decode_s = 0.0
        self._pace = ""
        self._taker = WeightsTaker(self.ctx, self._engine)
        self._outboxes = [Outbox(self.ctx, Role.REWARD)]
        if config.needs_reference:
            self._outboxes.append(Outbox(self.ctx, Role.REFERENCE))
        if declaration(config).has_critic:
            self._outboxes.append(Outbox(self.ctx, Role.VALUE))
        for outbox in self._outboxes:
            self.ctx.spawn(f"outbox-{outbox.role}", outbox.discover())
        await self._take_first_weights()

    async def run(self) -> None:
        """Decode until told to drain, while writers carry what is finished."""
        for number in range(_NUM_WRITERS):
            self.ctx.spawn(f"writer-{number}", self._write_windows())
        self.ctx.spawn("weights", self._taker.watch())
        self.ctx.spawn("leases", self._keep_leases())
        try:
            await self._decode()
        except (EngineDied, ParityFailed, WeightsRejected) as error:
            await self._give_up(error)
            raise

    async def _decode(self) -> None:
        while not self.ctx.draining.is_set():
            await self._swap_weights()
            await self._lease_and_resume()
            self.ctx.held = len(self._held)
            if self._engine.stats().num_live == 0:
                if self._held:
                    self._say_writing()
                await self.ctx.clock.sleep(_IDLE_S)
                continue
            self.ctx.waiting_for(WaitingFor.COMPUTE, self._pace)
            started, before = time.perf_counter(), self._engine.stats().num_sampled_tokens
            windows = await self.ctx.compute(self._sample)
            took_s = time.perf_counter() - started
            self._decode_s += took_s
            stats = self._engine.stats()
            self._pace = (
                f"{stats.num_live} live, {(stats.num_sampled_tokens - before) / max(took_s, 1e-9):,.0f} tokens/s"
            )
            for window in windows:
                await self._pass_on(window)
            self._count()
            self._add(TURNS, 1)
            self.ctx.progress()

    async def drain(self) -> None:
        """Cut every live window, write it, and open what is unfinished for others."""
        for window in await self.ctx.compute(self._engine.cut):
            await self._pass_on(window)
        await self._finished.join()
        await self.ctx.replay.give_back(self.ctx.who)
        self._count()
        self.ctx.log.info("generator_drained", **self.ctx.counters)

    async def _give_up(self, error: Exception) -> None:
        """The engine is lost, or must not sample any more: write what it had sampled, and open the rest for others at once, not
        when leases run out."""
        self.ctx.log.error("generator_gives_up", reason=str(error), held=len(self._held))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_GIVE_UP_S):
                if isinstance(error, WeightsRejected):  # the engine is well, and what it sampled so far is good
                    for window in await self.ctx.compute(self._engine.cut):
                        await self._pass_on(window)
                await self._finished.join()
        await self.ctx.replay.give_back(self.ctx.who)

    async def teardown(self) -> None:
        """End what the engine runs on; what was sampled stays known."""
        self._tally.close()
        await self.ctx.compute(self._engine.close)
        self._taker.close()

    # -- the decode loop -----------------------------------------------------------------------------------------------

    def _sample(self) -> list[Window]:
        """Decode for a turn, one step at a time: what a generator that is killed had sampled is known to the step."""
        windows: list[Window] = []
        stats = self._engine.stats()
        for _ in range(self.ctx.config.generation.steps_per_turn):
            before = stats.num_decode_steps
            windows += self._engine.advance(1)
            stats = self._engine.stats()
            if stats.num_decode_steps != before:  # an engine that decodes by itself may have stood still meanwhile
                work.step()
            num_refused = int(self.ctx.counters.get("refused_tokens", 0))
            self._tally.write(num_sampled=stats.num_sampled_tokens, num_refused=num_refused, num_held=len(self._held))
            if stats.num_live == 0 or (windows and stats.num_live < self._engine.num_slots) or self._may_swap():
                break
        return windows

    async def _pass_on(self, window: Window) -> None:
        while self._finished.full():
            self._say_writing()
            await self.ctx.clock.sleep(_IDLE_S)
        if window.finish_reason.is_final:
            self._ended.add(window.trajectory)
        self._finished.put_nowait(window)

    def _say_writing(self) -> None:
        """The engine has nothing to do until chunks are written: say what that waits for."""
        if self._store_trouble:
            self.ctx.waiting_for(WaitingFor.LEDGER, self._store_trouble)
        else:
            self.ctx.waiting_for(WaitingFor.ROOM, "its chunks to be written")

    async def _lease_and_resume(self) -> None:
        if self._is_swapping():
            if not self._engine.stats().num_live:
                self.ctx.waiting_for(WaitingFor.WEIGHTS, "a newer version that is announced")
            return
        if await self._is_better_left_to_others():
            while not self._resumed.empty():
                await self._let_go(self._resumed.get_nowait())
            if not self._held:
                self.ctx.waiting_for(WaitingFor.ROOM, f"{self.ctx.pulse.unreached}; others do its work")
            return
        while not self._resumed.empty():
            self._submit(self._held[self._resumed.get_nowait()])
        # A response that has ended needs no slot while it is written; one that goes on keeps its slot, and its KV cache.
        wanted = self._engine.num_slots - len(self._held) + len(self._ended)
        if wanted <= 0 or not self._credit.may_ask(self.ctx.clock.monotonic()):
            return
        grant = await self.ctx.replay.lease(
            self.ctx.who, max_trajectories=wanted, policy_version=self._engine.policy_version
        )
        for lease in grant.leases:
            if not await self._is_new(lease):
                continue
            if not await self._can_begin(lease):
                await self.ctx.replay.give_back(self.ctx.who, (lease.trajectory,))
                continue
            held = self._hold(lease)
            self._held[lease.trajectory] = held
            self._submit(held)
        if grant.refusal is None:
            self._credit.news()
        else:
            self._credit.refused(self.ctx.clock.monotonic())
        if grant.refusal is not None and not self._held:
            self.ctx.waiting_for(WaitingFor.CREDIT, _REFUSALS[grant.refusal])

    async def _is_better_left_to_others(self) -> bool:
        """Whether chunks from here reach no scorer, while another generator's do: its are scored at once, ours when due."""
        if not any(outbox.is_cut_off for outbox in self._outboxes):
            return False
        now = self.ctx.clock.monotonic()
        if now >= self._next_look_around:
            self._next_look_around = now + _LOOK_AROUND_S
            beats, at_s = await self.ctx.registry.heartbeats(), self.ctx.clock.time()
            self._others_reach = any(
                beat.who.role is Role.GENERATOR
                and beat.who.worker != self.ctx.who.worker
                and beat.policy_version >= 0
                and not unreached_workers(beat.unreached) - {Role.LEARNER}  # its chunks reach scorers
                and at_s - beat.at_s < _SILENT_AFTER_S
                for beat in beats
            )
        return self._others_reach

    async def _is_new(self, lease: Lease) -> bool:
        """Return whether nothing of a leased trajectory is under way here. A trajectory that was opened by hand may come back
        before its window is written: if that window is still the next one it stays, else the trajectory is opened again."""
        held = self._held.get(lease.trajectory)
        if held is None:
            return True
        if lease.next_index == held.next_index:
            return False
        if lease.trajectory not in self._unwritten:
            return True  # its window is stored, and is being sent: this is the next one
        await self.ctx.replay.give_back(self.ctx.who, (lease.trajectory,))
        return False

    async def _can_begin(self, lease: Lease) -> bool:
        """An evaluation begins under its version or a later one; one that cannot yet is opened again, not waited for."""
        if lease.evaluation is None or self._engine.policy_version >= lease.evaluation.policy_version:
            return True
        self.ctx.waiting_for(WaitingFor.WEIGHTS, f"version {lease.evaluation.policy_version} for an evaluation")
        await self._taker.look()
        await self._swap_weights()
        return self._engine.policy_version >= lease.evaluation.policy_version

    def _hold(self, lease: Lease) -> _Held:
        last = lease.last_chunk
        if last is not None:
            tokens = np.concatenate([last.context_tokens, last.tokens])
            return _Held(lease, last.prompt, tokens, lease.next_index)
        prompt = self._source.at(lease.prompt) if lease.evaluation is None else self._source.evaluation_at(lease.prompt)
        return _Held(lease, prompt, np.empty(0, np.int32), lease.next_index)

    def _submit(self, held: _Held) -> None:
        self._unwritten.add(held.lease.trajectory)
        generation = self.ctx.config.generation
        evaluation = held.lease.evaluation
        if evaluation is None:
            sampling = SamplingParams(generation.temperature, generation.top_p, generation.top_k)
        else:
            sampling = SamplingParams(evaluation.temperature, evaluation.top_p)
        self._engine.submit(
            WindowRequest(
                trajectory=held.lease.trajectory,
                prompt_tokens=held.prompt.tokens,
                response_tokens=held.response_tokens,
                window_tokens=generation.window_tokens,
                max_response_tokens=generation.max_response_tokens,
                sampling=sampling,
                seed=self.ctx.config.run.seed,
            )
        )

    async def _keep_leases(self) -> None:
        """Renew the leases while the engine gets on: a turn may take longer than they last. When it stands still, they run out,
        and what it held goes on elsewhere."""
        lease_s = self.ctx.config.ledger.lease_s
        while True:
            await self.ctx.clock.sleep(lease_s / 4)
            patience_s = max(lease_s, TIMES_SLOWEST * self.ctx.work.report().slowest_s)
            if self._held and self.ctx.clock.monotonic() - self.ctx.moved_s < patience_s:
                await self.ctx.replay.renew(self.ctx.who)

    def _add(self, counter: str, amount: int) -> None:
        self.ctx.counters[counter] = self.ctx.counters.get(counter, 0) + amount

    def _count(self) -> None:
        stats = self._engine.stats()
        self.ctx.counters.update(
            sampled_tokens=stats.num_sampled_tokens,
            prefill_tokens=stats.num_prefill_tokens,
            decode_steps=stats.num_decode_steps,
            live=stats.num_live,
            decode_s=self._decode_s,
        )

    # -- weights -------------------------------------------------------------------------------------------------------

    async def _take_first_weights(self) -> None:
        """Wait for a version and take it. One that was refused is waited out: the learner mends it or publishes a newer one.
        Nothing is held meanwhile, and other generators go on."""
        kind, detail = WaitingFor.WEIGHTS, "the learner's first version"
        while self._engine.policy_version < 0 and not self.ctx.draining.is_set():
            self.ctx.waiting_for(kind, detail)
            try:
                await self._taker.look()
            except WeightsDamaged as error:
                kind, detail = WaitingFor.QUARANTINE, str(error)
            if self._taker.has_newer:
                await self._taker.swap()
            else:
                await self._taker.wait()

    def _is_swapping(self) -> bool:
        """With ``swap = window``, a newer version waits until every live window has ended, and nothing new begins."""
        return self.ctx.config.generation.swap == "window" and self._taker.has_newer

    def _may_swap(self) -> bool:
        """Whether a newer version waits for nothing but the end of this turn."""
        return self._taker.has_newer and not self._is_swapping()

    async def _swap_weights(self) -> None:
        """Serve the newest version that is verified. Raises WeightsRejected when one was refused, or does not fit."""
        if not (self._is_swapping() and self._engine.stats().num_live):
            before = self._engine.policy_version
            await self._taker.swap()
            if self._engine.policy_version != before:
                self._credit.news()  # a version that is published is credit for what comes after it

    # -- the writers ---------------------------------------------------------------------------------------------------

    async def _write_windows(self) -> None:
        while True:
            window = await self._finished.get()
            await self._write(window)
            self._ended.discard(window.trajectory)
            self._finished.task_done()
            self.ctx.progress()

    async def _write(self, window: Window) -> None:
        held = self._held[window.trajectory]
        self._unwritten.discard(window.trajectory)
        if window.finish_reason is FinishReason.ABORT:
            self._add("refused_tokens", window.tokens.size)
            await self._let_go(window.trajectory)
            return
        chunk = self._chunk(held, window)
        encoded = encode_once(chunk)
        outcome = await self._store(chunk, encoded)
        if outcome.status in (WriteStatus.STORED, WriteStatus.DUPLICATE):
            # a duplicate is a repeat whose first answer was lost: nobody has sent it yet
            self._add("chunks" if outcome.status is WriteStatus.STORED else "duplicates", 1)
            self.ctx.delivered += 1
            self._add("written_tokens", chunk.num_tokens)
            await self._deliver(chunk, encoded)
        else:
            self._add("refused_tokens", chunk.num_tokens)
            self.ctx.log.info("chunk_not_stored", chunk=str(chunk.id), status=outcome.status)
        if self._held.get(window.trajectory) is not held:
            return  # while the chunk was stored and sent, the decode loop leased the trajectory anew: what is held is that
        if outcome.keeps_lease and not self.ctx.draining.is_set():
            tokens = np.concatenate([held.response_tokens, window.tokens])
            self._held[window.trajectory] = _Held(held.lease, held.prompt, tokens, held.next_index + 1)
            await self._resumed.put(window.trajectory)
            return
        if outcome.status is WriteStatus.FENCED:
            # Usually it is another's by now. But a server that lost its last writes may count it as ours at an earlier chunk.
            await self._let_go(window.trajectory)
            return
        del self._held[window.trajectory]

    async def _let_go(self, trajectory: TrajectoryId) -> None:
        """Hand a trajectory that cannot go on here to whoever leases it next; it is never scored as wrong."""
        del self._held[trajectory]
        await self.ctx.replay.give_back(self.ctx.who, (trajectory,))

    async def _store(self, chunk: TrajectoryChunk, encoded: Encoded) -> ChunkWrite:
        """Write the chunk, however long the ledger is away or full: it is held here until then, so nothing is lost."""

        def say(error: Exception) -> None:
            if not self._store_trouble:
                self.ctx.log.warning("chunk_held_back", chunk=str(chunk.id), reason=str(error))
            self._store_trouble = str(error)

        written = await ride_out(
            lambda: self.ctx.replay.write_chunk(self.ctx.who, chunk, encoded),
            clock=self.ctx.clock,
            timeout_s=self.ctx.config.ledger.outage_timeout_s,
            on_wait=say,
        )
        self._store_trouble = ""
        return written

    async def _deliver(self, chunk: TrajectoryChunk, encoded: Encoded) -> None:
        """Send the chunk to the mailboxes that need it; what finds no room in time is left to the overdue index."""
        for outbox in self._outboxes:
            if outbox.role is Role.REWARD and not chunk.finish_reason.is_final:
                continue
            if outbox.role is not Role.REWARD and chunk.trajectory.is_evaluation:
                continue
            timeout_s = _DRAIN_SEND_S if self.ctx.draining.is_set() else self.ctx.config.wire.send_timeout_s
            if not await outbox.send(encoded, timeout_s=timeout_s):
                self._add("undelivered", 1)

    def _chunk(self, held: _Held, window: Window) -> TrajectoryChunk:
        text = None
        if window.finish_reason.is_final:
            text = self._tokenizer.decode(np.concatenate([held.response_tokens, window.tokens]).tolist())
        return TrajectoryChunk(
            id=ChunkId(window.trajectory, held.next_index),
            prompt=held.prompt,
            context_tokens=held.response_tokens,
            tokens=window.tokens,
            behavior_logprobs=window.behavior_logprobs,
            segments=window.segments,
            finish_reason=window.finish_reason,
            response_text=text,
            worker=str(self.ctx.who),
            created_s=time.time(),
        )
