"""A training state as named tensors, for snapshots in the host's memory.

    model/<name>                weights that change
    <state>/<parameter name>    the optimiser's, as in a checkpoint (``checkpoint_files``)
    rng/<device>                random generator states

The note is the content of a checkpoint's ``training.json``.

A copy runs on its own thread beside the one that computes. On the host numpy copies: it releases
the GIL and starts none of torch's threads, which would compete with the step's. A GPU copies on its
own stream, starting when the loan begins, and the loan ends when that stream is done. (The tests
have no GPU: that part is not tested.)"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import msgspec
import numpy as np
import torch

from pipeline.process import work
from pipeline.training.live_states import BufferPages, LiveState, OpenLoans, StateLoan
from pipeline.training.snapshots import KeptState
from pipeline.weights.tensorfile import TensorSpec, in_order
from protocol.errors import DataError
from workers.engines.model.checkpoint_files import TrainingState, parse_training_state
from workers.engines.model.optimizer import GuardedOptimizer
from workers.engines.model.weights_file import spec_of, torch_type

WEIGHT = "model/"
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By element size: numpy lacks some of torch's types, and a copy needs only their size."""


class StateCopier:
    """Makes live states of one model and tracks their loans.

    Layout and views of the pages are cached: building them takes longer than copying a small model."""

    def __init__(self) -> None:
        self.loans = OpenLoans()
        self._key: list[tuple[str, torch.dtype, torch.Size]] = []
        self._specs: tuple[TensorSpec, ...] = ()
        self._views: WeakKeyDictionary[BufferPages, list[torch.Tensor]] = WeakKeyDictionary()

    def live_state(
        self, weights: Mapping[str, torch.Tensor], states: Mapping[str, torch.Tensor], state: TrainingState
    ) -> LiveState:
        tensors = {**{f"{WEIGHT}{name}": tensor for name, tensor in weights.items()}, **states}
        key = [(name, tensor.dtype, tensor.shape) for name, tensor in tensors.items()]
        if key != self._key:
            self._key, self._views = key, WeakKeyDictionary()
            self._specs = tuple(in_order(spec_of(name, tensor, tensor.dtype) for name, tensor in tensors.items()))
        ordered = [tensors[spec.name].detach() for spec in self._specs]
        copy_into = copy_of(ordered)

        def begin(loan: StateLoan, pages: BufferPages) -> None:
            del pages
            self.loans.add(loan)

        def copy(pages: BufferPages) -> None:
            copy_into(self._views_of(pages, ordered))

        return LiveState(self._specs, msgspec.json.encode(state).decode(), copy, begin)

    def _views_of(self, pages: BufferPages, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        if pages not in self._views:
            self._views[pages] = [
                torch.from_numpy(page).view(tensor.dtype).view(tensor.shape)
                for page, tensor in zip(pages.arrays, like, strict=True)
            ]
        return self._views[pages]


def copy_of(tensors: Sequence[torch.Tensor]) -> Callable[[Iterable[torch.Tensor]], None]:
    """Return a function that copies these live tensors, as of now, into host tensors, on any
    thread."""
    device = next((tensor.device for tensor in tensors if tensor.is_cuda), None)
    moment = None if device is None else torch.cuda.current_stream(device).record_event()

    def copy(views: Iterable[torch.Tensor]) -> None:
        with torch.no_grad(), _beside(device, moment):
            for view, tensor in zip(views, tensors, strict=True):
                if tensor.is_cuda:
                    view.copy_(tensor, non_blocking=True)
                else:
                    np.copyto(_bits(view), _bits(tensor))
                work.step()

    return copy


@contextmanager
def _beside(device: torch.device | None, moment: Any) -> Generator[None]:
    """Run copies on another stream, after ``moment`` of the current one, and wait for them."""
    if device is None:
        yield
        return
    stream = torch.cuda.Stream(device)
    stream.wait_event(moment)
    try:
        with torch.cuda.stream(stream):
            yield
    finally:
        stream.synchronize()


def _bits(tensor: torch.Tensor) -> np.ndarray:
    return tensor.view(_BITS[tensor.element_size()]).numpy()


def read_kept(kept: KeptState) -> tuple[TrainingState, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return training state, weights by name, and optimiser and random states. Raises DataError."""
    state = parse_training_state(kept.note.encode(), kept.path)
    weights: dict[str, torch.Tensor] = {}
    states: dict[str, torch.Tensor] = {}
    for name, (spec, data) in kept.tensors.items():
        tensor = _tensor(spec, data)
        if name.startswith(WEIGHT):
            weights[name.removeprefix(WEIGHT)] = tensor
        else:
            states[name] = tensor
    return state, weights, states


def put_back_state(kept: KeptState, live: Mapping[str, torch.Tensor], optimizer: GuardedOptimizer) -> None:
    """Restore a kept state. On DataError nothing has changed."""
    state, weights, states = read_kept(kept)
    check_weights(weights, {name: tensor.shape for name, tensor in live.items()}, kept.path)
    sorted_states = optimizer.sort(states, state, kept.path)
    with torch.no_grad():
        for name, tensor in live.items():
            tensor.copy_(weights[name])
            work.step()
    optimizer.restore(sorted_states, state)


def check_weights(weights: Mapping[str, torch.Tensor], shapes: Mapping[str, torch.Size], path: Path) -> None:
    """Raise DataError unless the weights of ``path`` have exactly these ``shapes``."""
    found = {name: tensor.shape for name, tensor in weights.items()}
    if found != dict(shapes):
        differing = sorted(name for name in found.keys() | shapes.keys() if found.get(name) != shapes.get(name))
        raise DataError(f"{path} does not fit the model of this run: {differing[:4]} differ; the model was changed")


def _tensor(spec: TensorSpec, data: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(data).view(torch_type(spec)).view(spec.shape)
