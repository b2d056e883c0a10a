"""The learner of the benchmark of hosts: publishes versions when its parent requests them.

*Consumes* lines on stdin: ``whole 3`` or ``delta 3``. *Produces* a line of JSON for each version.
*Waits for* the next line."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from time import monotonic
from typing import Any, cast

import numpy as np

from ops.bench.weights.actor import actor
from pipeline.weights.tensorfile import Publication, TensorSpec, publication
from protocol.ids import Role
from workers.learner.weight_publisher import WeightPublisher

_CHANGED_EVERY = 40
"""In a delta, one in so many bf16 numbers changes by its last bit: as after a step at 1e-6."""


class _Numbers:
    """The part of a training backend that publishing reads: one tensor of bf16 numbers."""

    def __init__(self, num_bytes: int) -> None:
        self._numbers = np.random.default_rng(0).integers(0, 1 << 16, num_bytes // 2, dtype=np.uint16)

    def step(self, kind: str, number: int) -> None:
        """Change all numbers, or some."""
        if kind == "whole":
            self._numbers += np.uint16(257)
        else:
            self._numbers[number % _CHANGED_EVERY :: _CHANGED_EVERY] ^= np.uint16(1)

    def base_publication(self) -> None:
        """Return none: there are no adapters."""

    def publication(self, base_digest: str | None = None) -> Publication:
        """Return the version."""
        assert base_digest is None
        return publication([TensorSpec("w", "BF16", (self._numbers.size,))], self._blocks())

    def _blocks(self) -> Iterator[np.ndarray]:
        data = self._numbers.view(np.uint8)
        for start in range(0, data.size, 1 << 20):
            yield data[start : start + (1 << 20)]


async def _main(run_dir: Path, num_bytes: int) -> None:
    numbers = _Numbers(num_bytes)
    async with actor(run_dir, Role.LEARNER, "learner") as (ctx, teardown):
        publisher = WeightPublisher(ctx)
        teardown.callback(publisher.close)
        await publisher.start()
        while line := await asyncio.to_thread(sys.stdin.readline):
            kind, number = line.split()
            numbers.step(kind, int(number))
            started = monotonic()
            await publisher.publish(int(number), cast("Any", numbers))
            announced = await ctx.registry.weights()
            assert announced is not None
            told = {"version": int(number), "started": started, "announced": monotonic(), "bytes": announced.num_bytes}
            print(json.dumps(told), flush=True)


if __name__ == "__main__":
    asyncio.run(_main(Path(sys.argv[1]), int(sys.argv[2])))
