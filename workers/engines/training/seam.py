"""The seam between the learner and its training backends, which block its one compute thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from pipeline.algorithms.batching import TrainingSample
from pipeline.training.spikes import NO_LIMITS, StepLimits

if TYPE_CHECKING:
    from pipeline.algorithms.objective import Objective
    from pipeline.training.live_states import LiveState
    from pipeline.training.snapshots import KeptState
    from pipeline.weights.tensorfile import Publication


@dataclass(frozen=True, slots=True)
class MetricCounts:
    """What a step's metrics are means over, to join them with those of other steps."""

    loss_tokens: int = 1
    loss_rows: int = 1
    """Samples with a loss token."""
    imitated_tokens: int = 1

    @classmethod
    def of(cls, samples: Sequence[TrainingSample]) -> MetricCounts:
        """Count a mini-batch's."""
        tokens = [int(np.count_nonzero(sample.loss_mask)) for sample in samples]
        imitated = sum(int(np.count_nonzero(s.nll_mask)) for s in samples if s.nll_mask is not None)
        return cls(sum(tokens), sum(map(bool, tokens)), imitated)


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of one optimiser step."""

    applied: bool
    """False when loss or gradient was not finite, or above its limit: nothing then changed."""
    loss: float
    grad_norm: float
    learning_rate: float
    metrics: dict[str, float]
    """Means over the loss mask of the whole batch: clip_fraction, approx_kl, entropy ...

    Those whose names end in ``_max`` or ``_min`` are the largest or smallest in it."""
    num_tokens: int
    """Prompt and response tokens that went through the model."""
    counts: MetricCounts = MetricCounts()
    """Set by the update that took the step (``workers.learner.policy_update``)."""


class TrainingBackend(Protocol):
    """Owns the policy's weights and optimiser."""

    def response_logprobs(self, samples: Sequence[TrainingSample]) -> list[np.ndarray]:
        """Return, for each sample, float32 [response tokens] log-probs under the present weights,
        at the sampling temperature. No gradients."""
        ...

    def step(
        self, samples: Sequence[TrainingSample], objective: Objective, limits: StepLimits = NO_LIMITS
    ) -> StepResult:
        """Do one optimiser step on the whole of ``samples``, in micro-batches by token budget. The
        denominator of the loss is that of the whole batch, so micro-batching changes nothing.
        Samples without ``old_logprobs`` take the present policy as the proximal one: right for the
        only step of an update. A step above ``limits`` is refused; DeepSpeed's knows none."""
        ...

    def set_learning_rate(self, learning_rate: float) -> None:
        """Step at another rate from the next step on: that after the warm-up, of which the schedule
        takes its share."""
        ...

    def tensors(self) -> Iterator[tuple[str, Any]]:
        """Yield the weights by Hugging Face names, on the CPU, tied ones once (or arrays)."""
        ...

    def base_publication(self) -> Publication | None:
        """Lay out the weights that never change, when only an adapter on top of them is trained.
        They are published once. None when whole versions are published."""
        ...

    def publication(self, base_digest: str | None = None) -> Publication:
        """Lay out the present weights for generators, before they change: all, or the adapter when
        ``base_digest`` names the published base. Engines that need a parity probe get one."""
        ...

    def digests(self) -> dict[str, bytes]:
        """Return digests of ``tensors`` by name: equal ones mean equal bits, types and shapes."""
        ...

    def environment(self) -> dict[str, str]:
        """Return the facts besides data that the numbers depend on: device, threads, libraries."""
        ...

    def random_state(self) -> dict[str, bytes]:
        """Return the backend's random streams, by device."""
        ...

    def restore_random_state(self, states: Mapping[str, bytes]) -> None:
        """Put back the streams that ``random_state`` returned."""
        ...

    def snapshot(self) -> Callable[[Path], None]:
        """Copy the state of an exact resume to the host; return a function that writes the copy.

        The function writes Hugging Face format under ``folder/model``, and optimiser, schedule and
        RNG state beside it (safetensors and JSON, nothing pickled). It may run on another thread
        while training goes on, and raises OSError. The caller fsyncs and renames."""
        ...

    def load(self, folder: Path) -> None:
        """Take back a snapshot. Raises DataError naming the file that is missing or damaged."""
        ...

    def live_state(self) -> LiveState:
        """Return the state of an exact resume where it lies, to be lent before the next change.
        Weights that never change are left out.

        While it is lent, it is only read. A step, a load and ``put_back`` wait for the loan's end
        before they change it. They raise EngineDied when its copy stands still. For a state that
        this method has copied itself they wait for nothing."""
        ...

    def put_back(self, kept: KeptState) -> None:
        """Take back a copied ``live_state``. On DataError nothing has changed."""
        ...

    def close(self) -> None:
        """Release resources outside this process: other ranks end."""
        ...
