"""How much of a model's weights changes at a learner's step, and the size of a delta.

The steps are real steps of the learner's own backend, with master weights and moments in float32. The figures
are the share of numbers that change, bytes of the delta and of the whole version, and seconds to make and apply
it. Every delta is applied, and must give the new version bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from time import perf_counter

import numpy as np

from ops.bench.learner import Shape, make_model, make_samples
from pipeline.algorithms.dapo import Dapo
from pipeline.weights.delta import apply, encode
from pipeline.weights.digest import digest_buffer
from pipeline.weights.store import write_publication
from pipeline.weights.tensorfile import read_contents
from workers.engines.model.optimizer import OptimizerSettings
from workers.engines.model.weights_file import publish_tensors
from workers.engines.training.policy_gradient import ForwardSettings
from workers.engines.training.torch import TorchTraining

SHAPE = Shape("54M", hidden=512, layers=13, vocabulary=8192, num_samples=4)


@dataclass(frozen=True, slots=True)
class Change:
    """The figures of one step."""

    dtype: str
    learning_rate: float
    step: int
    num_parameters: int
    changed: float
    """Share of the numbers in which at least one bit changed."""
    whole_bytes: int
    delta_bytes: int
    encode_s: float
    apply_s: float

    @property
    def times_fewer(self) -> float:
        return self.whole_bytes / self.delta_bytes


def changes(
    *, dtype: str, learning_rate: float, num_steps: int, shape: Shape = SHAPE, seed: int = 0
) -> Iterator[Change]:
    model = make_model(shape.hidden, shape.layers, shape.vocabulary)
    training = TorchTraining(
        model,
        ForwardSettings(temperature=1.0, micro_batch_tokens=1024, autocast=None),
        OptimizerSettings(learning_rate=learning_rate),
    )
    before = _publish(training, dtype)
    for step in range(1, num_steps + 1):
        result = training.step(make_samples(shape, seed + step), Dapo.of())
        assert result.applied
        after = _publish(training, dtype)
        contents = read_contents(after)
        started = perf_counter()
        delta = encode(
            before,
            after,
            heads=(read_contents(before).head_bytes, contents.head_bytes),
            stride=contents.stride,
            digests=(digest_buffer(before), digest_buffer(after)),
            max_bytes=2 * after.size,
        )
        encoded = perf_counter()
        assert delta is not None
        again = np.empty_like(after)
        apply(memoryview(delta), before, again, head_bytes=read_contents(before).head_bytes)
        applied = perf_counter()
        assert np.array_equal(again, after), "a delta must give the version bit for bit"
        kind = np.dtype(f"<u{contents.stride}")
        head = contents.head_bytes
        yield Change(
            dtype=dtype,
            learning_rate=learning_rate,
            step=step,
            num_parameters=sum(parameter.numel() for parameter in model.parameters()),
            changed=float(np.mean(before[head:].view(kind) != after[head:].view(kind))),
            whole_bytes=after.size,
            delta_bytes=len(delta),
            encode_s=encoded - started,
            apply_s=applied - encoded,
        )
        before = after


def _publish(training: TorchTraining, dtype: str) -> np.ndarray:
    publication = publish_tensors(training.tensors(), dtype=dtype)
    data = np.empty(publication.num_bytes, np.uint8)
    write_publication(data, publication)
    return data
