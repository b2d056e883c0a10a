"""The common part of the policy's and the critic's backends on shares.

Every rank receives the whole batch, makes the same loss weights of it, and computes its share of
the micro-batches. So the sum over ranks is that of one process, in another order of adding."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pipeline.algorithms.batching import TrainingSample, plan_ranks
from pipeline.training.live_states import LiveState
from pipeline.training.snapshots import KeptState
from workers.engines.scoring.seam import ScoringRequest
from workers.engines.training.ranks.messages import Command
from workers.engines.training.ranks.sharded import ShardedModel
from workers.engines.value.seam import ValueSample


class RankedBackend:
    """A model in shares. A subclass sends commands by ``self._lead.run`` to ``obey``."""

    def __init__(self, model: ShardedModel, *, micro_batch_tokens: int) -> None:
        self._model = model
        self._shards, self._group, self._lead = model.shards, model.group, model.lead
        self._max_tokens = micro_batch_tokens

    @property
    def num_steps(self) -> int:
        """Optimiser steps applied since the start of the run, over resumes."""
        return self._shards.num_steps

    def snapshot(self) -> Callable[[Path], None]:
        """Gather the state of an exact resume; return its writer, by the seam's contract."""
        return self._model.snapshot()

    def load(self, folder: Path) -> None:
        """Take back any backend's snapshot. On DataError, naming the file, nothing has changed."""
        self._model.load(folder)

    def live_state(self) -> LiveState:
        """Gather the state of an exact resume."""
        return self._model.live_state()

    def put_back(self, kept: KeptState) -> None:
        """Take back a copied ``live_state``. On DataError nothing has changed."""
        self._model.put_back(kept)

    def close(self) -> None:
        """Let the other ranks end."""
        self._lead.stop()

    def obey(self, command: Command) -> Any:
        """Carry out a command, with all ranks at once; the return value is meant for rank 0."""
        return self._model.obey(command)

    @property
    def _loss_scale(self) -> float:
        """Factor of gradients where the shares average them over the ranks, to be the batch's."""
        return float(self._group.size) if self._shards.averages_gradients else 1.0

    def _plan(self, sequences: Sequence[TrainingSample | ScoringRequest | ValueSample]) -> list[list[int]]:
        """Return this rank's micro-batches, as indices into ``sequences``."""
        lengths = [int(sequence.tokens.size) for sequence in sequences]
        return plan_ranks(lengths, self._group.size, self._max_tokens)[self._group.rank]

    def _bring_together(self, lengths: Sequence[int], own: Mapping[int, np.ndarray]) -> list[np.ndarray]:
        """Return float32 [length] for each sequence; this rank has its ``own``, by index."""
        ends = np.cumsum(lengths)
        everything = np.zeros(int(ends[-1]), np.float32)
        for index, values in own.items():
            everything[ends[index] - lengths[index] : ends[index]] = values
        # one rank has each, the others 0: a sum brings them together as they are
        return np.split(self._group.sum(torch.from_numpy(everything)).numpy(), ends[:-1])
