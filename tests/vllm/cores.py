"""Cores that tests share: one takes seconds to make, so it is lent by architecture, and returned
empty."""

from __future__ import annotations

import hashlib
from pathlib import Path

from transformers import PreTrainedModel

from workers.engines.generation.vllm.arguments import engine_arguments
from workers.engines.generation.vllm.in_process import InProcessCore

POSITIONS = 512
BLOCK = 32
"""Tokens of a cached block: the fewest that vLLM's CPU kernels serve well."""
MAX_SLOTS = 16


class CorePool:
    """In-process cores by architecture."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._free: dict[str, list[InProcessCore]] = {}
        self._lent: list[tuple[str, InProcessCore]] = []

    def take(self, model: PreTrainedModel) -> InProcessCore:
        """Lend a core of the model's architecture, with any weights."""
        key = hashlib.sha256(model.config.to_json_string().encode()).hexdigest()[:16]
        free = self._free.setdefault(key, [])
        core = free.pop() if free else self._make(key, model)
        self._lent.append((key, core))
        return core

    def give_back(self) -> None:
        """Take back the lent cores, without requests."""
        for key, core in self._lent:
            core.cut(core.live)
            self._free[key].append(core)
        self._lent.clear()

    def _make(self, key: str, model: PreTrainedModel) -> InProcessCore:
        path = self._folder / key
        if not path.exists():
            model.save_pretrained(path)
        # a small cache: the default would be zeroed first
        extra = {"block_size": BLOCK, "num_gpu_blocks_override": 400}
        return InProcessCore(
            engine_arguments(path, num_slots=MAX_SLOTS, positions=POSITIONS, dtype="float32", on_cpu=True, extra=extra)
        )
