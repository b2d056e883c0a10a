"""The interface between the learner and its training backends, whose calls block the learner's
compute thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from pipeline.algorithms.batching import TrainingSample
from pipeline.training.spikes import NO_LIMITS, StepLimits

if TYPE_CHECKING:
    from pipeline.algorithms.base import Rule
    from pipeline.training.live_states import LiveState
    from pipeline.training.snapshots import KeptState
    from pipeline.weights.tensorfile import Publication


@dataclass(frozen=True, slots=True)
class MetricCounts:
    """How many tokens or samples a step's metrics average over, to combine several steps."""

    loss_tokens: int = 1
    loss_rows: int = 1
    """Samples with a loss token."""
    imitated_tokens: int = 1

    @classmethod
    def of(cls, samples: Sequence[TrainingSample]) -> MetricCounts:
        tokens = [int(np.count_nonzero(sample.loss_mask)) for sample in samples]
        imitated = sum(int(np.count_nonzero(s.nll_mask)) for s in samples if s.nll_mask is not None)
        return cls(sum(tokens), sum(map(bool, tokens)), imitated)


@dataclass(frozen=True, slots=True)
class StepResult:
    applied: bool
    """False when loss or gradient was not finite or above its limit; then nothing changed."""
    loss: float
    grad_norm: float
    learning_rate: float
    metrics: dict[str, float]
    """Means over the loss mask of the whole batch (clip_fraction, approx_kl, entropy, ...); maxima
    and minima where the name ends in ``_max`` or ``_min``."""
    num_tokens: int
    """Prompt and response tokens of the samples, each counted whole."""
    counts: MetricCounts = MetricCounts()
    """Set by the update that took the step (``workers.learner.policy_update``)."""


class TrainingBackend(Protocol):
    def response_logprobs(self, samples: Sequence[TrainingSample]) -> list[np.ndarray]:
        """Return float32 [response tokens] for each sample, at the sampling temperature, without
        gradients."""
        ...

    def step(self, samples: Sequence[TrainingSample], rule: Rule, limits: StepLimits = NO_LIMITS) -> StepResult:
        """Take one optimiser step on all of ``samples``, in micro-batches by token budget.

        The loss is normalised over the whole batch, so micro-batching changes nothing. For samples
        without ``old_logprobs`` the current policy is the proximal one, which is right for the only
        step of an update. A step above ``limits`` is refused; DeepSpeed ignores limits."""
        ...

    def set_learning_rate(self, learning_rate: float) -> None:
        """Use this peak learning rate, which the schedule scales, from the next step on."""
        ...

    def tensors(self) -> Iterator[tuple[str, Any]]:
        """Yield the weights by Hugging Face name, as tensors or arrays, tied ones once."""
        ...

    def base_publication(self) -> Publication | None:
        """Lay out the frozen weights below an adapter, which are published once.

        None when whole versions are published."""
        ...

    def publication(self, base_digest: str | None = None) -> Publication:
        """Lay out the current weights for generators. They are written on another thread, under the
        loan that the publication's ``begin`` gets; the next step waits for its end.

        With ``base_digest``, the digest of the published base, only the adapter is laid out.
        Engines that need a parity probe get one."""
        ...

    def digests(self) -> dict[str, bytes]:
        """Return digests of ``tensors`` by name; equal digests mean equal bits, types and shapes."""
        ...

    def environment(self) -> dict[str, str]:
        """Return what the numbers depend on besides data: device, threads, libraries."""
        ...

    def random_state(self) -> dict[str, bytes]: ...

    def restore_random_state(self, states: Mapping[str, bytes]) -> None: ...

    def snapshot(self) -> Callable[[Path], None]:
        """Copy the state for an exact resume to the host; return a function that writes the copy.

        The function writes Hugging Face format under ``folder/model``, and optimiser, schedule and
        RNG state beside it (safetensors and JSON, no pickle). It may run on another thread while
        training continues, and raises OSError. The caller fsyncs and renames."""
        ...

    def load(self, folder: Path) -> None:
        """Restore a snapshot. Raises DataError naming the file that is missing or damaged."""
        ...

    def live_state(self) -> LiveState:
        """Return the state for an exact resume without copying it, to be lent before the next
        change.

        Frozen weights are left out. A lent state is only read: a step, a load and ``put_back`` wait
        until the loan ends, and raise EngineDied if its copy makes no progress. If this method had
        to copy the state, they do not wait."""
        ...

    def put_back(self, kept: KeptState) -> None: ...

    def close(self) -> None:
        """Release resources outside this process, such as other ranks."""
        ...
