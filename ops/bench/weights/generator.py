"""A generator's process for the benchmark: decodes all the time, and takes weights as the generator worker does.

The engine, the registry, the weight receiver and the order of the loop are those of
``workers.generator.generator``. Leases, chunks and scorers are left out, because they do not touch weights.
Prints a line of JSON for every version that it serves, and ends when its input is closed.

    python -m ops.bench.weights.generator RUN_DIR BYTES"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from collections import deque
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import structlog
import torch
from transformers import Qwen3ForCausalLM

from ops.bench.learner import make_model
from ops.bench.weights.actor import actor
from pipeline.runtime.context import ActorContext
from protocol.ids import Role, TrajectoryId
from workers.engines.generation.local.engine import LocalEngine
from workers.engines.generation.seam import SamplingParams, WindowRequest
from workers.generator.weight_receiver import WeightReceiver

NUM_SLOTS = 8
VOCABULARY = 1024
_BYTES = 4
_WIDTHS = ((16 << 20, 128), (128 << 20, 512), (2 << 30, 1024), (1 << 62, 2048))
"""Models below this many bytes have this width."""
_RECENT = 24
"""Number of steps whose median is the step's time."""


def model_of_size(num_bytes: int) -> Qwen3ForCausalLM:
    """Make a random Qwen3 whose float32 weights take about ``num_bytes``; every call makes the same one."""
    width = next(width for limit, width in _WIDTHS if num_bytes < limit)
    layer, ends = 13 * width * width * _BYTES, 2 * VOCABULARY * width * _BYTES
    return make_model(width, max(1, round((num_bytes - ends) / layer)), VOCABULARY, head_dim=64)


class Decoding:
    """An engine whose slots are always full."""

    def __init__(self, engine: LocalEngine) -> None:
        self._engine = engine
        self._numbers = count()
        self._rng = np.random.default_rng(0)
        self.steps: deque[tuple[float, float]] = deque(maxlen=4096)
        """Begin and end of each step, monotonic."""

    def step(self) -> None:
        """Decode one token for every slot."""
        while self._engine.stats().num_live < NUM_SLOTS:
            self._engine.submit(
                WindowRequest(
                    trajectory=TrajectoryId("t", next(self._numbers), 0),
                    prompt_tokens=self._rng.integers(2, VOCABULARY, 16).astype(np.int32),
                    response_tokens=np.empty(0, np.int32),
                    window_tokens=256,
                    max_response_tokens=256,
                    sampling=SamplingParams(1.0),
                    seed=0,
                )
            )
        started = time.monotonic()
        self._engine.advance(1)
        self.steps.append((started, time.monotonic()))


async def serve(run_dir: Path, num_bytes: int, over: threading.Event) -> None:
    """Decode and take weights until ``over``."""
    engine = LocalEngine(model_of_size(num_bytes), num_slots=NUM_SLOTS)
    decoding = Decoding(engine)
    async with actor(run_dir, Role.GENERATOR, "generator-0") as (ctx, teardown):
        taker = WeightReceiver(ctx, engine)
        teardown.callback(taker.close)
        while engine.policy_version < 0 and not over.is_set():
            await taker.poll()
            await taker.swap()
            await ctx.clock.sleep(0.01)
        ctx.spawn("news", ctx.notifications.watch())
        ctx.spawn("weights", taker.watch())
        told, before = -1, dict(ctx.counters)
        while not over.is_set():
            await taker.swap()
            await ctx.compute(decoding.step)
            if engine.policy_version > told and len(decoding.steps) > _RECENT:
                told = engine.policy_version
                print(json.dumps(_served(ctx, before, list(decoding.steps))), flush=True)
                before = dict(ctx.counters)


def _served(ctx: ActorContext, before: dict[str, float], steps: list[tuple[float, float]]) -> dict[str, Any]:
    """Return the figures of a version whose first step is the last of ``steps``."""

    def spent(counter: str) -> float:
        return ctx.counters.get(counter, 0.0) - before.get(counter, 0.0)

    return {
        "version": ctx.policy_version,
        "served_at": steps[-1][0],
        "gap_s": steps[-1][0] - steps[-2][1],
        "step_s": median(end - start for start, end in steps[-_RECENT - 1 : -1]),
        "verify_s": spent("weights_s"),
        "pause_s": spent("weights_pause_s"),
        "bytes": spent("weights_bytes"),
    }


def main() -> None:
    """Run until the input is closed."""
    torch.set_num_threads(1)
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    over = threading.Event()

    def wait_for_the_end() -> None:
        sys.stdin.read()
        over.set()

    threading.Thread(target=wait_for_the_end, daemon=True).start()
    asyncio.run(serve(Path(sys.argv[1]), int(sys.argv[2]), over))


if __name__ == "__main__":
    main()
