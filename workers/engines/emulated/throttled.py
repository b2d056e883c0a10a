"""An engine slowed down to the pace of an emulated decode device, for benchmarks; samples are real.

A turn of s decode steps that sampled n tokens lasts at least ``s * decode_base_s + n *
decode_slot_s`` seconds. The engine sleeps for the part of it that the real work leaves.

On a CPU, training a token costs about as much as decoding one. So a pipeline gains little there
from not waiting. On accelerators decoding is bound by memory and dominates: a step costs nearly the
same for one live sequence as for many. This engine has that cost, while the tokens, log-probs and
updates stay real."""

from __future__ import annotations

import time
from typing import Any, cast

from workers.engines.emulated.pace import Pace
from workers.engines.generation.seam import GenerationEngine, SampledWindow


def throttled(engine: GenerationEngine, *, decode_base_s: float, decode_slot_s: float) -> GenerationEngine:
    """Slow an engine to a device's prices: seconds a decode step, and of each live sequence."""
    return cast("GenerationEngine", _ThrottledEngine(engine, decode_base_s, decode_slot_s))


class _ThrottledEngine:
    """Wraps a generation engine, whose other methods and properties are its own."""

    def __init__(self, engine: GenerationEngine, decode_base_s: float, decode_slot_s: float) -> None:
        self._engine = engine
        self._base_s = decode_base_s
        self._slot_s = decode_slot_s
        self._pace = Pace()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def advance(self, max_steps: int) -> list[SampledWindow]:
        """Run up to ``max_steps`` decode steps, and return no sooner than the device would have."""
        started, before = time.perf_counter(), self._engine.stats()
        windows = self._engine.advance(max_steps)
        after = self._engine.stats()
        steps = after.num_decode_steps - before.num_decode_steps
        tokens = after.num_sampled_tokens - before.num_sampled_tokens
        lasts_s = steps * self._base_s + tokens * self._slot_s
        self._pace.spend(lasts_s - (time.perf_counter() - started))
        return windows
