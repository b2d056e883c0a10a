"""The generator: prompts with credit in, chunks out.

Leases come from the ledger: new groups, or trajectories that no generator holds. The ledger has
each chunk before a scorer does. The generator waits for credit, which the learner returns by
settling or dropping, and for room in a scorer's mailbox; that wait is the back-pressure.

Two loops share the process. The *decode* loop feeds the engine and swaps weights; it alone touches
the engine, on the compute thread. It asks for leases while it decodes
(``workers.generator.leasing``). The *writers* carry finished windows on while the engine decodes
(``workers.generator.chunk_writer``). Between them are one bounded queue and the stage of each
trajectory (``workers.generator.held_trajectories``). New weights are fetched and verified beside
both (``workers.generator.weight_receiver``).

Only turns that yield tokens count as progress: a dead engine may report success
(``workers.generator.self_check``).

Counters in the heartbeat: ``sampled_tokens`` (after a drain each is written or refused),
``prefill_tokens``, ``decode_steps``, ``turns``, ``decode_s`` (seconds in the engine), ``live`` and
``slots`` (trajectories in the engine, and its capacity), ``standstill_s`` (how long turns have
yielded no token), ``longest_standstill_s`` (the longest such time that ended), and those of the
writers and of the weights."""

from __future__ import annotations

import contextlib
import time
from asyncio import timeout
from collections.abc import Sequence
from typing import ClassVar

from pipeline.config.ledger_spec import ledger_spec
from pipeline.data.source import PromptSource
from pipeline.data.tokenizer import TextTokenizer, load_text_tokenizer
from pipeline.ledger.types import REFUSAL_WORDS, Lease
from pipeline.observability.regenerated_tokens import SampledTokenCounts
from pipeline.preflight.model_folder import loading
from pipeline.process import work
from pipeline.process.work import TIMES_SLOWEST, piece_limit_s
from pipeline.runtime.actor import Actor, ActorContext
from pipeline.runtime.context import WorkInHand
from pipeline.runtime.liveness import is_silent
from pipeline.runtime.registry.contract import WaitingFor
from pipeline.runtime.registry.entries import LONGEST_STANDSTILL, STANDSTILL
from pipeline.runtime.role_sender import RoleSender
from pipeline.weights import TURNS
from protocol.errors import EngineDied, ParityFailed, WeightsRejected
from protocol.ids import Role
from protocol.trajectory import FinishReason
from workers.engines.build import build_generation_engine
from workers.engines.generation.seam import EngineStats, GenerationEngine, SampledWindow
from workers.generator.chunk_writer import ChunkWriter, opening_window
from workers.generator.followed_weights import FollowedWeights, VersionFollower
from workers.generator.held_trajectories import HeldTrajectories, Renewal
from workers.generator.leasing import Leasing
from workers.generator.self_check import NUM_PROMPTS, SelfChecker, StallDetector
from workers.generator.weight_receiver import WeightReceiver

_IDLE_S = 0.02
_GIVE_UP_S = 5.0
_LOOK_EVERY_S = 1.0


class Neighbours:
    """The other generators of the run, as seen in their heartbeats.

    If one of them reaches scorers that are unreachable from here, work is better left to it: a
    chunk that reaches no scorer is scored only when it is overdue."""

    def __init__(self, ctx: ActorContext) -> None:
        self._ctx = ctx
        self._next_look_s = 0.0
        self._reach_scorers = False

    async def reach_scorers(self) -> bool:
        """Return whether a live neighbour with weights reaches scorers; checked once a second."""
        now_s = self._ctx.clock.monotonic()
        if now_s >= self._next_look_s:
            self._next_look_s = now_s + _LOOK_EVERY_S
            found = await self._ctx.registry.reaching_generators()
            me = self._ctx.who.worker
            self._reach_scorers = any(name != me and not is_silent(silent_s) for name, silent_s in found.items())
        return self._reach_scorers


def receiver_of(ctx: ActorContext, engine: GenerationEngine) -> WeightReceiver | VersionFollower:
    """Return what keeps an engine at the newest version: its weights, or without a model its
    number."""
    followed: FollowedWeights | None = ctx.prepared.take("weights")
    if ctx.config.has_sampling:
        return WeightReceiver(ctx, engine, followed)
    if followed is not None:
        followed.close()
    return VersionFollower(ctx, engine)


class Generator(Actor):
    role: ClassVar[Role] = Role.GENERATOR

    def __init__(self, ctx: ActorContext) -> None:
        super().__init__(ctx)
        # Set at the start of the process.
        self._leasing = Leasing(ctx)
        self._neighbours = Neighbours(ctx)
        self._decode_s = 0.0
        self._stalls = StallDetector()
        self._pace = ""
        # Set in setup, closed in teardown.
        self._source: PromptSource
        self._engine: GenerationEngine
        self._before: EngineStats
        self._held: HeldTrajectories
        self._writer: ChunkWriter
        self._taker: WeightReceiver | VersionFollower
        self._tally: SampledTokenCounts
        self._check: SelfChecker

    async def setup(self) -> None:
        ctx, config = self.ctx, self.ctx.config
        tokenizer = load_text_tokenizer(config.model.path)
        ctx.starting("reading prompts")
        source = await ctx.prepare("prompts", PromptSource, config, tokenizer)
        await ctx.ledger.open(ledger_spec(config, source))
        ctx.starting(loading(config.model.path))
        began_s = ctx.clock.monotonic()
        engine = await ctx.prepare("generation", build_generation_engine, config)
        ctx.log.info("model_loaded", seconds=round(ctx.clock.monotonic() - began_s, 3))
        roles = [Role.ENVIRONMENT if config.has_environment else Role.REWARD]
        if config.needs_reference:
            roles.append(Role.REFERENCE)
        if config.has_critic:
            roles.append(Role.VALUE)
        senders = [RoleSender(ctx, role) for role in roles]
        self._assemble(source, tokenizer, engine, senders)
        for sender in senders:
            ctx.spawn(f"sender-{sender.role}", sender.discover())
        await self._taker.take_first()

    def _assemble(
        self, source: PromptSource, tokenizer: TextTokenizer, engine: GenerationEngine, senders: Sequence[RoleSender]
    ) -> None:
        self._source, self._engine = source, engine
        self._held = HeldTrajectories(engine.num_slots, self.ctx.clock.monotonic)
        self._writer = ChunkWriter(self.ctx, self._held, tokenizer, senders, max_waiting=2 * engine.num_slots)
        self._tally = SampledTokenCounts(self.ctx.run_dir, self.ctx.who)
        self._before = engine.stats()
        self._taker = receiver_of(self.ctx, engine)
        self._check = SelfChecker(self.ctx, engine, [source.at(place) for place in range(NUM_PROMPTS)])
        self.ctx.watch_in_hand(lambda: WorkInHand(self._held.since_s, output_depth=self._writer.num_unsent))

    async def run(self) -> None:
        self._writer.start()
        self.ctx.spawn("weights", self._taker.watch())
        self.ctx.spawn("leases", self._keep_leases())
        if self.ctx.config.has_sampling:
            self.ctx.spawn("self-checks", self._check.watch())
        try:
            await self._decode()
        except (EngineDied, ParityFailed, WeightsRejected) as error:
            await self._give_up(error)
            raise

    async def drain(self) -> None:
        """Cut and write every live window, and release unfinished trajectories to other generators."""
        for window in await self.ctx.compute(self._engine.cut):
            await self._writer.pass_on(window)
        await self._writer.join()
        await self._leasing.join()
        await self.ctx.ledger.give_back(self.ctx.who)
        self._count()
        self.ctx.log.info("generator_drained", **self.ctx.counters)

    async def _give_up(self, error: Exception) -> None:
        """Write the lost engine's samples, and release its trajectories before their leases expire."""
        self.ctx.log.error("generator_failed", reason=str(error), held=len(self._held))
        with contextlib.suppress(TimeoutError):
            async with timeout(_GIVE_UP_S):
                # Refused weights leave the engine healthy, and its samples so far valid.
                if isinstance(error, WeightsRejected):
                    for window in await self.ctx.compute(self._engine.cut):
                        await self._writer.pass_on(window)
                await self._writer.join()
                await self._leasing.join()
        await self.ctx.ledger.give_back(self.ctx.who)

    async def teardown(self) -> None:
        self._tally.close()
        await self.ctx.compute(self._engine.close)
        self._taker.close()

    # -- the decode loop --

    async def _decode(self) -> None:
        while not self.ctx.draining.is_set():
            await self._swap_weights()
            if self._check.is_due and not self._stats().num_live:
                # not trained on, like refused ones
                self.ctx.count("refused_tokens", await self._check.answer())
            await self._lease_and_resume()
            self.ctx.held = len(self._held)
            if self._stats().num_live == 0:
                self._stalls.rest()
                self.ctx.counters[STANDSTILL] = 0.0
                if self._held:
                    self._writer.report_wait()
                await self.ctx.clock.sleep(_IDLE_S)
                continue
            self.ctx.waiting_for(WaitingFor.COMPUTE, self._pace)
            began_s, before = self.ctx.clock.monotonic(), self._stats()
            started = time.perf_counter()
            windows = await self.ctx.turn(self._sample, begins=not self._stalls.is_on)
            took_s = time.perf_counter() - started
            self._decode_s += took_s
            stats = self._stats()
            has_tokens = self._stalls.observe_turn(
                before,
                stats,
                num_windows=len(windows),
                began_s=began_s,
                now_s=self.ctx.clock.monotonic(),
                limit_s=self._longest_standstill_s(),
            )
            num_tokens, num_steps = (
                stats.num_sampled_tokens - before.num_sampled_tokens,
                stats.num_decode_steps - before.num_decode_steps,
            )
            self.ctx.work.served("sampling", seconds=took_s, size=num_tokens, pieces=num_steps)
            tokens_per_s = num_tokens / max(took_s, 1e-9)
            self._pace = f"{stats.num_live} live, {tokens_per_s:,.0f} tokens/s"
            for window in windows:
                await self._writer.pass_on(window)
                if window.finish_reason is not FinishReason.WINDOW:
                    self._leasing.slot_came_free()
            self._count()
            self.ctx.count(TURNS)
            if has_tokens:
                self.ctx.progress()

    def _longest_standstill_s(self) -> float:
        """Return the longest allowed time without a token: half of what the watchdog allows."""
        return 0.5 * piece_limit_s(self.ctx.work.report().slowest_s, self.ctx.config.supervisor.stuck_after_s)

    def _sample(self) -> list[SampledWindow]:
        """Decode for one turn.

        Each step is recorded, so that a killed generator's tokens are known to the step."""
        windows: list[SampledWindow] = []
        stats = self._stats()
        for _ in range(self.ctx.config.generation.steps_per_turn):
            before = stats.num_decode_steps
            windows += self._engine.advance(1)
            stats = self._stats()
            # An engine that decodes on its own may have made no step.
            if stats.num_decode_steps != before:
                work.step()
            num_refused = int(self.ctx.counters.get("refused_tokens", 0))
            self._tally.write(num_sampled=stats.num_sampled_tokens, num_refused=num_refused, num_held=len(self._held))
            has_room = stats.num_live < self._engine.num_slots
            if stats.num_live == 0 or (has_room and (windows or self._leasing.has_answer)) or self._may_swap():
                break
        return windows

    def _stats(self) -> EngineStats:
        """Return the engine's counters for this worker, without a standby's trial before it."""
        now, before = self._engine.stats(), self._before
        return EngineStats(
            now.num_live,
            now.num_decode_steps - before.num_decode_steps,
            now.num_sampled_tokens - before.num_sampled_tokens,
            now.num_prefill_tokens - before.num_prefill_tokens,
        )

    def _count(self) -> None:
        stats = self._stats()
        self.ctx.counters.update(
            sampled_tokens=stats.num_sampled_tokens,
            prefill_tokens=stats.num_prefill_tokens,
            decode_steps=stats.num_decode_steps,
            live=stats.num_live,
            slots=self._engine.num_slots,
            decode_s=self._decode_s,
        )
        self.ctx.counters[STANDSTILL] = self._stalls.stood_s
        self.ctx.counters[LONGEST_STANDSTILL] = self._stalls.longest_s

    # -- leases --

    async def _lease_and_resume(self) -> None:
        """Submit held trajectories that can continue, and ask for more for the free slots.

        Waits for the answer only if there is nothing to decode."""
        await self._hold_granted()
        if not self._may_begin():
            return
        if self._writer.reaches_no_scorer and await self._neighbours.reach_scorers():
            for held in self._held.leased:
                await self._writer.let_go(held)
            if not self._held:
                self.ctx.waiting_for(WaitingFor.ROOM, f"{self.ctx.worker_state.unreached}; others do its work")
            return
        self._submit_resumable()
        self._leasing.ask(self._held.num_free_slots, self._engine.policy_version)
        if not self._stats().num_live:
            await self._leasing.join()
            await self._hold_granted()
            if self._may_begin():
                self._submit_resumable()

    def _may_begin(self) -> bool:
        """Whether windows may begin, or a version or a check waits for the live ones to end."""
        if self._is_swapping():
            if not self._stats().num_live:
                self.ctx.waiting_for(WaitingFor.WEIGHTS, "a newer version that is announced")
            return False
        return not self._check.is_due

    async def _hold_granted(self) -> None:
        """Hold what the ledger has granted since the last turn."""
        grant = self._leasing.take()
        if grant is None:
            return
        for lease in grant.leases:
            await self._begin(lease)
        if grant.refusal is not None and not self._held:
            self.ctx.waiting_for(WaitingFor.CREDIT, REFUSAL_WORDS[grant.refusal])

    async def _begin(self, lease: Lease) -> None:
        renewal = self._held.renewal(lease)
        if renewal is Renewal.UNDER_WAY:
            return
        if renewal is Renewal.ELSEWHERE or not await self._can_begin(lease):
            await self.ctx.ledger.give_back(self.ctx.who, (lease.trajectory,))
            return
        if lease.last_chunk is not None:
            prompt = lease.last_chunk.prompt
        else:
            asked = lease.evaluation
            at, first = (self._source.evaluation_at, asked.first_prompt) if asked else (self._source.at, 0)
            prompt = at(first + lease.prompt)
        self._held.add(lease, prompt)
        if self.ctx.config.has_environment and lease.last_chunk is None:
            self._held.submit(lease.trajectory)
            await self._writer.pass_on(opening_window(lease.trajectory, self._engine.policy_version))

    async def _can_begin(self, lease: Lease) -> bool:
        """Whether the engine serves an evaluation's version or a later one, now or after a swap."""
        if lease.evaluation is None or self._engine.policy_version >= lease.evaluation.policy_version:
            return True
        self.ctx.waiting_for(WaitingFor.WEIGHTS, f"version {lease.evaluation.policy_version} for an evaluation")
        await self._taker.poll()
        await self._swap_weights()
        return self._engine.policy_version >= lease.evaluation.policy_version

    def _submit_resumable(self) -> None:
        for held in self._held.resumable:
            self._engine.submit(self._held.submit(held.trajectory).request(self.ctx.config, self._source.responses))

    async def _keep_leases(self) -> None:
        """Renew leases while the engine makes progress, since a turn may outlast them.

        When it stands still they expire."""
        lease_s = self.ctx.config.ledger.lease_s
        while True:
            await self.ctx.clock.sleep(lease_s / 4)
            patience_s = max(lease_s, TIMES_SLOWEST * self.ctx.work.report().slowest_s)
            if self._held and self.ctx.clock.monotonic() - self.ctx.moved_s < patience_s:
                await self.ctx.ledger.renew(self.ctx.who)

    # -- weights --

    def _is_swapping(self) -> bool:
        """Whether a newer version waits for all live windows to end; nothing new begins then."""
        return self.ctx.config.generation.swap == "window" and self._taker.has_newer

    def _may_swap(self) -> bool:
        return self._taker.has_newer and not self._is_swapping()

    async def _swap_weights(self) -> None:
        """Raises WeightsRejected when a version was refused or does not fit."""
        if not (self._is_swapping() and self._stats().num_live):
            before = self._engine.policy_version
            await self._taker.swap(counts=not self._stats().num_live)
            if self._engine.policy_version != before:
                self._leasing.credit_came()
