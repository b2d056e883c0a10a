"""A simulated generator: slots that decode together, leases, windows, and weights that are swapped in.

A decode step costs as much as it has sequences, so the pace changes only when a window ends or begins: from one such
moment to the next everything is known. A turn ends, and leases and weights are looked at, as in
``workers.generator.generator``: when a window ends, at the next step if an answer or weights came, and otherwise
after ``generation.steps_per_turn`` steps."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable
from heapq import heappop, heappush
from typing import TYPE_CHECKING

from pipeline.ledger.pacing import MOST_PAUSE_S, LeasePacing
from pipeline.ledger.types import Refusal
from pipeline.plan.costs import Costs
from pipeline.plan.simulate.clock import Clock
from pipeline.plan.simulate.ledger import Segment, Server, SimulatedLedger, Versions
from pipeline.plan.simulate.scorers import ScorerPool
from protocol.ids import ChunkId, TrajectoryId
from protocol.trajectory import Field

if TYPE_CHECKING:
    from pipeline.config.schema import RunConfig

NUM_WRITERS = 16
_NEVER = math.inf


class Generator:
    """One generator."""

    def __init__(
        self,
        number: int,
        clock: Clock,
        config: RunConfig,
        costs: Costs,
        ledger: SimulatedLedger,
        server: Server,
        pools: dict[Field, ScorerPool],
        prompt_tokens: float,
        fleet: Counter[str],
    ) -> None:
        self.number, self._fleet = number, fleet
        self._clock, self._config, self._costs = clock, config, costs
        self._ledger, self._server, self._pools = ledger, server, pools
        self._prompt_tokens = prompt_tokens
        self._num_slots = config.generation.num_slots
        self._window = config.generation.window_tokens
        self._turn_steps = config.generation.steps_per_turn
        self.version = -1
        self._staged = -1
        self._versions = Versions()
        self._pacing = LeasePacing()
        self._live: list[tuple[int, int, TrajectoryId]] = []
        """A heap of the windows in the engine: last step, first step, trajectory."""
        self._resumed: deque[TrajectoryId] = deque()
        self._leased: deque[TrajectoryId] = deque()
        self._held = 0
        """Trajectories whose last window is not sampled yet."""
        self._num_unsent = 0
        self._grant: tuple[list[TrajectoryId], Refusal | None] | None = None
        self._needed = 0
        self._is_asking = False
        self._steps = 0
        """Decode steps so far."""
        self._begun_s, self._step_s, self._target = 0.0, 0.0, 0
        """The present stretch: when it began, how long a step takes, and its last step."""
        self._wakes_s = _NEVER
        self._is_decoding = False
        self.refused_s: float | None = None
        """When credit was refused last, while a slot is free."""
        self.slot_s = 0.0
        """Sums, over time: slots in use."""
        self.decode_s = 0.0
        self.refusals: dict[Refusal, float] = {}
        """Seconds in which slots were free, times these slots, by reason."""
        self._refusal: Refusal | None = None
        self._counted_s = 0.0
        self.num_tokens = 0

    def stage(self, version: int) -> None:
        """A version is here, verified."""
        if version > self._staged:
            self._staged = version
            self.poke()

    def poke(self, *, at_turn: bool = False) -> None:
        """Look at leases and weights: at the next step, or when the turn ends."""
        if not self._is_decoding:
            self._wake_at(self._clock.now)
            return
        begun = self._steps
        step = begun + max(1, math.ceil((self._clock.now - self._begun_s) / self._step_s - 1e-6))
        if at_turn:
            step = begun + -(-(step - begun) // self._turn_steps) * self._turn_steps
        if step < self._target:
            self._target = step
            self._wake_at(self._begun_s + (step - begun) * self._step_s)

    def _wake_at(self, at_s: float) -> None:
        if at_s < self._wakes_s:
            self._wakes_s = at_s
            self._clock.after(at_s - self._clock.now, lambda: self._wake(at_s))

    def _wake(self, at_s: float) -> None:
        if at_s == self._wakes_s:  # otherwise something earlier has happened since
            self._wakes_s = _NEVER
            self._turn()

    # -- a turn ----------------------------------------------------------------------------------

    def _turn(self) -> None:
        self._count()
        if self._is_decoding:
            self._end_stretch()
        if self._staged > self.version and not (self._swaps_between_windows and self._live):
            pause_s = self._costs.weights.load_s if self.version >= 0 else 0.0
            self.version = self._staged
            self._versions.swap(self._steps, self.version)
            self._pacing.credit_came()
            if pause_s:
                self._wake_at(self._clock.now + pause_s)
                return
        if self.version < 0:
            return
        prefill_s = 0.0
        if self._grant is not None:
            self._hold(self._grant)
        if not (self._swaps_between_windows and self._staged > self.version):
            prefill_s = self._submit()
            self._ask()
        self._begin_stretch(prefill_s)

    @property
    def _swaps_between_windows(self) -> bool:
        return self._config.generation.swap == "window"

    def _hold(self, grant: tuple[list[TrajectoryId], Refusal | None]) -> None:
        leases, refusal = grant
        self._grant = None
        self._leased.extend(leases)
        self._held += len(leases)
        self._refusal = refusal

    def _submit(self) -> float:
        """Give free slots to what can continue; return the seconds of their prefill."""
        prefill_s = 0.0
        ahead = max(0, self._held - self._num_slots)
        while self._resumed or len(self._leased) > ahead:
            is_new = not self._resumed
            name = self._leased.popleft() if is_new else self._resumed.popleft()
            response = self._ledger.trajectories[name]
            if is_new:
                context = self._prompt_tokens + response.done
                prefill_s += context * self._costs.generator.prefill_token_s
            num = min(self._window, response.length - response.done)
            heappush(self._live, (self._steps + num, self._steps, name))
            self._fleet["live"] += 1
        return prefill_s

    def _ask(self) -> None:
        """Ask for leases, unless that was refused just now or is under way."""
        now = self._clock.now
        if self._is_asking or self._grant is not None or self._num_unsent > NUM_WRITERS + 2 * self._num_slots:
            return
        free = self._num_slots - self._held
        wanted = self._pacing.wanted(free, now)
        if wanted:
            self._is_asking, self._needed = True, max(0, free)
            self._clock.after(self._server.reply_s(), lambda: self._answered(wanted))

    def _answered(self, wanted: int) -> None:
        grant = self._ledger.lease(wanted, policy_version=self.version)
        self._is_asking, self._grant = False, grant
        leases, refusal = grant
        self.refused_s = self._clock.now if refusal is not None else None
        self._pacing.answered(
            len(leases), num_needed=self._needed, is_refused=refusal is not None, now_s=self._clock.now
        )
        if leases or not self._is_decoding:
            self.poke()

    def credit(self) -> None:
        """Something was freed: ask when the pause after the last refusal is over."""
        if self.refused_s is None or self._is_asking or self._held >= self._num_slots:
            return
        pauses = math.floor((self._clock.now - self.refused_s) / MOST_PAUSE_S) + 1
        delay_s = self.refused_s + pauses * MOST_PAUSE_S - self._clock.now + 1e-6
        self.refused_s = None

        def ask() -> None:
            # should the answer be no again, later credit wakes it again
            self.refused_s = self._clock.now
            self.poke(at_turn=True)

        self._clock.after(delay_s, ask)

    # -- decoding --------------------------------------------------------------------------------

    def _begin_stretch(self, prefill_s: float) -> None:
        self._is_decoding = bool(self._live)
        if self._live:
            self._step_s = max(1e-9, self._costs.generator.decode_s(len(self._live), self._context_tokens()))
            self._begun_s = self._clock.now + prefill_s
            self._target = self._live[0][0]
            self._wake_at(self._begun_s + (self._target - self._steps) * self._step_s)

    def _context_tokens(self) -> float:
        if not self._costs.generator.decode_context_token_s:
            return 0.0
        done = sum(self._ledger.trajectories[name].done + self._steps - begun for _, begun, name in self._live)
        return done + self._prompt_tokens * len(self._live)

    def _end_stretch(self) -> None:
        self.decode_s += self._clock.now - self._begun_s
        self.num_tokens += (self._target - self._steps) * len(self._live)
        self._steps, self._is_decoding = self._target, False
        while self._live and self._live[0][0] <= self._steps:
            end, begun, name = heappop(self._live)
            self._fleet["live"] -= 1
            response = self._ledger.trajectories[name]
            if response.done + end - begun >= response.length:
                self._held -= 1
                self._pacing.slot_came_free(self._clock.now)
            self._write(name, self._versions.segments(begun, end), end - begun)

    def _write(self, name: TrajectoryId, segments: list[Segment], num_tokens: int) -> None:
        self._num_unsent += 1
        delay_s = self._server.reply_s(num_tokens, is_chunk=True) + self._costs.wire.sent_s(num_tokens)
        self._clock.after(delay_s, lambda: self._stored(name, segments))

    def _stored(self, name: TrajectoryId, segments: list[Segment]) -> None:
        num_tokens = sum(tokens for _, tokens in segments)
        chunk, fields, continues = self._ledger.write(name, segments)
        response_tokens = self._prompt_tokens + chunk.index * self._window + num_tokens
        pools = [self._pools[one] for one in fields if one in self._pools and one is not Field.GUIDANCE]
        self._deliver(chunk, pools, response_tokens, lambda: self._sent(name, continues))

    def _deliver(self, chunk: ChunkId, pools: list[ScorerPool], num_tokens: float, sent: Callable[[], None]) -> None:
        """Send a chunk to one mailbox after the other, waiting for room in each."""
        if not pools:
            sent()
            return
        first, *others = pools
        first.send(self.number, chunk, num_tokens, lambda: self._deliver(chunk, others, num_tokens, sent))

    def _sent(self, name: TrajectoryId, continues: bool) -> None:
        self._num_unsent -= 1
        if continues:
            self._resumed.append(name)
        elif name in self._ledger.trajectories and not self._ledger.trajectories[name].final:
            self._held -= 1  # parked
        self.poke(at_turn=True)

    def _count(self) -> None:
        """Count the time since the last turn."""
        now = self._clock.now
        live_s = (now - self._counted_s) * len(self._live)
        self.slot_s += live_s
        free = self._num_slots - len(self._live)
        if self._refusal is not None and free > 0:
            self.refusals[self._refusal] = self.refusals.get(self._refusal, 0.0) + (now - self._counted_s) * free
        self._counted_s = now
