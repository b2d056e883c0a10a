"""The learner's side of the benchmark: publishes versions by the learner's own publisher, and times their way to
the generator.

The clock is the system's monotonic one, which all processes of a host share. In every round a memcpy and the
publisher take turns, while the generator decodes all the time."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any, cast

import numpy as np
import torch

from ops.bench.weights.actor import actor
from ops.bench.weights.generator import model_of_size
from pipeline.algorithms.batching import TrainingSample
from pipeline.config.load import load_config, resolve_paths, write_resolved
from pipeline.ledger.server.embedded import open_ledger
from pipeline.supervisor.leftovers import clear_leftovers
from protocol.ids import Role
from workers.engines.model.adapter import Adapter
from workers.engines.training.publishing import TorchPublishing
from workers.learner.weight_publisher import WeightPublisher

_LIMIT_S = 600.0
"""Time limit for the generator to serve a version."""
_WARMUP = 4
"""Number of versions until every file is rewritten rather than new: fresh pages are no steady state."""
_CHANGED_EVERY = 50
"""One number in this many changes from version to version."""


@dataclass(frozen=True, slots=True)
class TransferMode:
    """One way to send weights to the generator."""

    name: str
    settings: tuple[str, ...]
    rank: int = 0
    """Above 0, versions are LoRA adapters of this rank on all linear layers of the blocks."""


TRANSFER_MODES = (
    TransferMode("file", ("weights.path=file", "weights.dtype=float32")),
    TransferMode("wire", ("weights.path=wire", "wire.transport=tcp", "weights.dtype=float32", "weights.delta=false")),
    TransferMode("wire, bf16 delta", ("weights.path=wire", "wire.transport=tcp", "weights.dtype=bfloat16")),
    TransferMode("file, adapter", ("weights.path=file", "weights.dtype=float32"), rank=8),
    TransferMode("wire, adapter", ("weights.path=wire", "wire.transport=tcp", "weights.dtype=float32"), rank=8),
)


@dataclass(frozen=True, slots=True)
class Turn:
    """One round, in seconds."""

    total_s: float
    """From the call of publish to the begin of the first step under the new version."""
    write_s: float
    """The learner lays the version out, writes and digests it."""
    verify_s: float
    """The generator maps or fetches it and checks its digest; an adapter is merged."""
    pause_s: float
    """The version is put into the engine."""
    gap_s: float
    """Between the last step under the old version and the first one under the new."""
    step_s: float
    """A decode step."""
    num_bytes: int
    """Bytes that were mapped, or received over the wire."""
    memcpy_s: float
    """One copy within a process, into pages that exist already."""

    @property
    def moving_s(self) -> float:
        """Without the waits for the announcement to be seen and for the running decode step to end."""
        return self.write_s + self.verify_s + self.pause_s


class _Weights(TorchPublishing):
    """A learner's weights, some of which change from version to version; with ``rank``, an adapter on them
    changes."""

    def __init__(self, num_bytes: int, rank: int) -> None:
        self._tensors = {name: tensor.clone() for name, tensor in model_of_size(num_bytes).state_dict().items()}
        self.num_bytes = sum(tensor.nbytes for tensor in self._tensors.values())
        self._layers = {
            name.removesuffix(".weight"): (torch.randn(rank, tensor.shape[1]), torch.zeros(tensor.shape[0], rank))
            for name, tensor in self._tensors.items()
            if rank and name.endswith("_proj.weight")
        }

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._tensors.items()

    def adapter(self) -> Adapter | None:
        return Adapter(self._layers, 1.0, below=self._tensors.items) if self._layers else None

    def response_logprobs(self, samples: Sequence[TrainingSample]) -> list[np.ndarray]:
        """Never called: these weights belong to no model."""
        raise NotImplementedError(f"{len(samples)} samples to score, expected none: these weights belong to no model")

    def step(self, number: int) -> None:
        """Change some weights by about a unit in bf16's last place, or all of an adapter."""
        for _, b in self._layers.values():
            b += 1e-5
        if self._layers:
            return
        for tensor in self._tensors.values():
            tensor.view(-1)[number % _CHANGED_EVERY :: _CHANGED_EVERY] *= 1.0 + 2.0**-7


def measure(way: TransferMode, num_bytes: int, *, rounds: int, folder: Path) -> tuple[int, list[Turn]]:
    """Return the size of the weights, and the rounds after the warm-up."""
    settings = [f"run.dir={folder}", "run.name=bench", *way.settings]
    config = resolve_paths(load_config([Path("configs/demo.toml")], settings))
    config.run_dir.mkdir(parents=True, mode=0o700)
    write_resolved(config, config.run_dir)
    server = open_ledger(config.run_dir, configured_url=None, max_memory_mb=64)
    try:
        return asyncio.run(_measure(config.run_dir, num_bytes, rounds, way.rank))
    finally:
        if server is not None:
            server.stop()
        clear_leftovers(config.run_dir)


async def _measure(run_dir: Path, num_bytes: int, rounds: int, rank: int) -> tuple[int, list[Turn]]:
    weights = _Weights(num_bytes, rank)
    turns: list[Turn] = []
    async with actor(run_dir, Role.LEARNER, "learner") as (ctx, teardown):
        generator = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "ops.bench.weights.generator", str(run_dir), str(num_bytes),
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        publisher = WeightPublisher(ctx)
        teardown.callback(publisher.close)
        await publisher.start()
        source = np.random.default_rng(0).integers(0, 256, weights.num_bytes, dtype=np.uint8)
        target = np.ones_like(source)
        try:
            for number in range(_WARMUP + rounds):
                is_counted = number >= _WARMUP
                started = monotonic()
                np.copyto(target, source)
                memcpy_s = monotonic() - started
                weights.step(number)
                written_s = ctx.counters.get("published_s", 0.0)
                started = monotonic()
                await publisher.publish(number, cast("Any", weights))
                served = await _served(generator, number)
                turn = Turn(
                    total_s=served["served_at"] - started,
                    write_s=ctx.counters["published_s"] - written_s,
                    verify_s=served["verify_s"],
                    pause_s=served["pause_s"],
                    gap_s=served["gap_s"],
                    step_s=served["step_s"],
                    num_bytes=int(served["bytes"]),
                    memcpy_s=memcpy_s,
                )
                if is_counted:
                    turns.append(turn)
        finally:
            with suppress(ProcessLookupError):
                if generator.stdin is not None:
                    generator.stdin.close()
                await asyncio.wait_for(generator.wait(), 60)
    return weights.num_bytes, turns


async def _served(generator: asyncio.subprocess.Process, version: int) -> dict[str, Any]:
    """Return the generator's report of a version."""
    assert generator.stdout is not None
    async with asyncio.timeout(_LIMIT_S):
        while line := await generator.stdout.readline():
            told: dict[str, Any] = json.loads(line)
            if told["version"] == version:
                return told
    raise RuntimeError(f"the generator ended before it served version {version}")
