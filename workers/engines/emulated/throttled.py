"""An engine slowed down to the pace of an emulated decode device, for benchmarks. Its samples are
real.

A turn of s decode steps that sampled n tokens lasts at least ``s * decode_base_s + n *
decode_slot_s`` seconds. The engine sleeps for the part of it that the real work leaves.

On a CPU, training a token costs about as much as decoding one. So a pipeline gains little there
from not waiting. On accelerators decoding is bound by memory and dominates: a step costs nearly the
same for one live sequence as for many. This engine has that cost, while the tokens, log-probs and
updates stay real.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from protocol.ids import TrajectoryId
from workers.engines.emulated.pace import Pace
from workers.engines.generation.seam import EngineStats, GenerationEngine, SampledWindow, WindowRequest

if TYPE_CHECKING:
    import numpy as np
    import torch

    from pipeline.weights.tensorfile import Publication


class ThrottledEngine:
    """Wraps a generation engine; see the module."""

    def __init__(self, engine: GenerationEngine, *, decode_base_s: float, decode_slot_s: float) -> None:
        """Take the engine and the device's prices: seconds a decode step, and more for each live
        sequence in it.
        """
        self._engine = engine
        self._base_s = decode_base_s
        self._slot_s = decode_slot_s
        self._pace = Pace()

    @property
    def num_slots(self) -> int:
        """Requests decoded at once."""
        return self._engine.num_slots

    @property
    def policy_version(self) -> int:
        """Version that new tokens are sampled with."""
        return self._engine.policy_version

    def view_weights(self, data: np.ndarray, path: Path) -> Mapping[str, Any]:
        """Return a version's tensors."""
        return self._engine.view_weights(data, path)

    def merge_weights(self, adapter: np.ndarray, base: np.ndarray, base_digest: str, *, dtype: str) -> Publication:
        """Lay out the merged weights of an adapter and its base."""
        return self._engine.merge_weights(adapter, base, base_digest, dtype=dtype)

    def stage_weights(self, tensors: Mapping[str, torch.Tensor], policy_version: int) -> None:
        """Bring weights near."""
        self._engine.stage_weights(tensors, policy_version)

    def load_weights(self, tensors: Mapping[str, torch.Tensor], policy_version: int) -> None:
        """Take new weights."""
        self._engine.load_weights(tensors, policy_version)

    def unserved(self, tensors: Mapping[str, torch.Tensor]) -> list[str]:
        """Return the names of tensors that are not served."""
        return self._engine.unserved(tensors)

    def submit(self, request: WindowRequest) -> None:
        """Queue a request."""
        self._engine.submit(request)

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

    def close(self) -> None:
        """End the engine's processes and threads."""
        self._engine.close()

    def cut(self) -> list[SampledWindow]:
        """End every live request at the present token."""
        return self._engine.cut()

    def forget(self, trajectory: TrajectoryId) -> None:
        """Free all state of a trajectory."""
        self._engine.forget(trajectory)

    def stats(self) -> EngineStats:
        """Return counters."""
        return self._engine.stats()
