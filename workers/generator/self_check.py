"""Checks of the generator's engine: the fleet's self-check (``headrace fleet selfcheck --fleet``),
and detection of a stalled engine.

Self-check: the desired fleet carries the number of the newest check. A generator that sees a new
one starts nothing until its live windows have ended. Then it samples the first prompts of the run's
data one by one, greedily, with the run's seed, and reports digests of tokens and log-probs together
with its policy version. It repeats this for the next versions, since answers are compared within
one version. Nothing of it is stored or trained on; its tokens count as refused.

A stalled engine reports success but samples nothing. A single turn without a token may be normal
(an engine that decodes on its own, a long prefill). After many in a row, for longer than any piece
of its work takes, the engine is dead."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import Final

import numpy as np
from xxhash import xxh3_64

from pipeline.process import work
from pipeline.runtime.context import ActorContext
from pipeline.runtime.notifications import LOOK_ANYWAY_S
from pipeline.runtime.registry.contract import Topic
from pipeline.runtime.registry.entries import CheckDigests
from protocol.errors import EngineDied, LedgerError
from protocol.ids import TrajectoryId
from protocol.trajectory import Prompt
from workers.engines.generation.seam import EngineStats, GenerationEngine, SampledWindow, SamplingParams, WindowRequest

MAX_EMPTY_TURNS: Final = 100
"""This many turns without a token are never an error, however long they took."""


class StallDetector:
    def __init__(self) -> None:
        self._num_empty = 0
        self._since_s = 0.0
        self.stood_s = 0.0
        """For how long turns have yielded no token, in seconds; 0 after one with tokens."""
        self.longest_s = 0.0
        """The longest such time that ended with tokens."""

    @property
    def is_on(self) -> bool:
        return self._num_empty > 0

    def observe_turn(
        self,
        before: EngineStats,
        after: EngineStats,
        *,
        num_windows: int,
        began_s: float,
        now_s: float,
        limit_s: float,
    ) -> bool:
        """Return whether a turn processed tokens or returned windows.

        Args:
            before: counters before the turn; some trajectory was live.
            after: counters after it.
            num_windows: windows that it returned.
            began_s: monotonic time of its start, in seconds.
            now_s: monotonic time of its end.
            limit_s: longest time without tokens.

        Raises EngineDied when too many turns, over more than ``limit_s``, yielded nothing."""
        if num_windows or _counts(before) != _counts(after):
            self.longest_s = max(self.longest_s, self.stood_s)
            self.rest()
            return True
        if not self._num_empty:
            self._since_s = began_s
        self._num_empty += 1
        self.stood_s = now_s - self._since_s
        if self._num_empty > MAX_EMPTY_TURNS and self.stood_s > limit_s:
            raise EngineDied(
                f"the engine returned no token in {self._num_empty} turns over {self.stood_s:.0f} s, and no error, with "
                f"{after.num_live} trajectories in it; expected tokens within {limit_s:.0f} s: it is dead or hangs, and a new "
                "engine takes its place"
            )
        return False

    def rest(self) -> None:
        """Reset: nothing is live, so no tokens are expected."""
        self._num_empty = 0
        self.stood_s = 0.0


def _counts(stats: EngineStats) -> tuple[int, int, int]:
    return stats.num_decode_steps, stats.num_sampled_tokens, stats.num_prefill_tokens


NUM_PROMPTS: Final = 2
MAX_TOKENS: Final = 32
MOST_VERSIONS: Final = 6
_LANE: Final = "e0"
_LIMIT_S: Final = 60.0


class SelfChecker:
    def __init__(self, ctx: ActorContext, engine: GenerationEngine, prompts: Sequence[Prompt]) -> None:
        """``prompts`` must be the same in all generators of the run."""
        self._ctx, self._engine, self._prompts = ctx, engine, prompts
        self._number, self._version, self._left = 0, -1, 0

    async def watch(self) -> None:
        changed = self._ctx.notifications.subscribe(Topic.RUN)
        while True:
            changed.clear()
            # an unreachable ledger shows in the generator's own calls
            with contextlib.suppress(LedgerError):
                await self.poll()
            await self._ctx.clock.wait(changed, LOOK_ANYWAY_S)

    async def poll(self) -> None:
        """Look for a new check; one from before this process started is answered, too."""
        fleet = await self._ctx.registry.fleet()
        if fleet is not None and fleet.check > self._number:
            self._number, self._version, self._left = fleet.check, -1, MOST_VERSIONS

    @property
    def is_due(self) -> bool:
        return self._left > 0 and self._engine.policy_version > self._version

    async def answer(self) -> int:
        """Answer on an engine without live requests; return the tokens it took. Raises EngineDied."""
        number, version = self._number, self._engine.policy_version
        tokens, logprobs, num_tokens = await self._ctx.compute(self._sampled)
        self._version, self._left = version, self._left - 1
        self._ctx.worker_state.check = CheckDigests(
            number=number, policy_version=version, tokens=tokens, logprobs=logprobs
        )
        self._ctx.worker_state.on_news()
        self._ctx.log.info("self_check_answered", number=number, policy_version=version, digest=tokens + logprobs)
        return num_tokens

    def _sampled(self) -> tuple[str, str, int]:
        tokens, logprobs, num_tokens = xxh3_64(), xxh3_64(), 0
        for place, prompt in enumerate(self._prompts):
            window = self._sample(TrajectoryId(_LANE, 10**9 + place, 0), prompt)
            num_tokens += window.tokens.size
            tokens.update(window.tokens.astype("<i4").tobytes())
            logprobs.update(window.behavior_logprobs.astype("<f4").tobytes())
            work.step()
        return tokens.hexdigest(), logprobs.hexdigest(), num_tokens

    def _sample(self, trajectory: TrajectoryId, prompt: Prompt) -> SampledWindow:
        self._engine.submit(
            WindowRequest(
                trajectory=trajectory,
                prompt_tokens=prompt.tokens,
                response_tokens=np.zeros(0, np.int32),
                window_tokens=MAX_TOKENS,
                max_response_tokens=MAX_TOKENS,
                sampling=SamplingParams(temperature=0.0),
                seed=self._ctx.config.run.seed,
            )
        )
        end_s = time.monotonic() + _LIMIT_S
        while time.monotonic() < end_s:
            if windows := self._engine.advance(1):
                self._engine.forget(trajectory)
                return windows[0]
            work.step()
        raise EngineDied(f"a self-check gave no tokens within {_LIMIT_S:g} s; other generators continue its work")
