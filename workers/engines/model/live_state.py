"""A training state as named tensors, for snapshots in the host's memory.

    model/<name>                weights that change
    <state>/<parameter name>    the optimiser's, as in a checkpoint (``checkpoint_files``)
    rng/<device>                the random streams

The note is what a checkpoint has in ``training.json``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from weakref import WeakKeyDictionary

import msgspec
import numpy as np
import torch

from pipeline.process import work
from pipeline.training.snapshots import BufferPages, KeptState, LiveState
from pipeline.weights.tensorfile import TensorSpec, in_order
from protocol.errors import DataError
from workers.engines.model.checkpoint_files import TrainingState, parse_training_state
from workers.engines.model.optimizer import GuardedOptimizer
from workers.engines.model.weights_file import spec_of, torch_type

_WEIGHT = "model/"
_AT_ONCE = 64
"""Tensors copied between two marks of progress."""


class StateCopier:
    """Makes live states of one model. Layout and views of the pages are kept from one to the next:
    to make them takes longer than a small model's copy."""

    def __init__(self) -> None:
        self._key: list[tuple[str, torch.dtype, torch.Size]] = []
        self._specs: tuple[TensorSpec, ...] = ()
        self._views: WeakKeyDictionary[BufferPages, list[torch.Tensor]] = WeakKeyDictionary()

    def live_state(
        self, weights: Mapping[str, torch.Tensor], states: Mapping[str, torch.Tensor], state: TrainingState
    ) -> LiveState:
        """Return live ``weights`` by name, and optimiser and random ``states`` as a checkpoint
        names them, as one state."""
        tensors = {**{f"{_WEIGHT}{name}": tensor for name, tensor in weights.items()}, **states}
        key = [(name, tensor.dtype, tensor.shape) for name, tensor in tensors.items()]
        if key != self._key:
            self._key, self._views = key, WeakKeyDictionary()
            self._specs = tuple(in_order(spec_of(name, tensor, tensor.dtype) for name, tensor in tensors.items()))
        ordered = [tensors[spec.name] for spec in self._specs]

        def copy(pages: BufferPages) -> None:
            views = self._views_of(pages, ordered)
            with torch.no_grad():
                for first in range(0, len(ordered), _AT_ONCE):
                    part = slice(first, first + _AT_ONCE)
                    torch._foreach_copy_(views[part], ordered[part])  # pyright: ignore[reportPrivateImportUsage]
                    work.step()

        return LiveState(self._specs, msgspec.json.encode(state).decode(), copy)

    def _views_of(self, pages: BufferPages, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return pages as tensors of the types and shapes of ``like``."""
        if pages not in self._views:
            self._views[pages] = [
                torch.from_numpy(page).view(tensor.dtype).view(tensor.shape)
                for page, tensor in zip(pages.arrays, like, strict=True)
            ]
        return self._views[pages]


def read_kept(kept: KeptState) -> tuple[TrainingState, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return note, weights by name, and optimiser and random states. Raises DataError."""
    state = parse_training_state(kept.note.encode(), kept.path)
    weights: dict[str, torch.Tensor] = {}
    states: dict[str, torch.Tensor] = {}
    for name, (spec, data) in kept.tensors.items():
        tensor = _tensor(spec, data)
        if name.startswith(_WEIGHT):
            weights[name.removeprefix(_WEIGHT)] = tensor
        else:
            states[name] = tensor
    return state, weights, states


def put_back_state(kept: KeptState, live: Mapping[str, torch.Tensor], optimizer: GuardedOptimizer) -> None:
    """Give ``live`` weights and their optimiser a kept state. On DataError nothing has changed."""
    state, weights, states = read_kept(kept)
    check_weights(weights, {name: tensor.shape for name, tensor in live.items()}, kept.path)
    sorted_states = optimizer.sort(states, state, kept.path)
    with torch.no_grad():
        for name, tensor in live.items():
            tensor.copy_(weights[name])
            work.step()
    optimizer.restore(sorted_states, state)


def check_weights(weights: Mapping[str, torch.Tensor], shapes: Mapping[str, torch.Size], path: Path) -> None:
    """Raise DataError when ``path`` has other weights than those of these ``shapes``."""
    found = {name: tensor.shape for name, tensor in weights.items()}
    if found != dict(shapes):
        differing = sorted(name for name in found.keys() | shapes.keys() if found.get(name) != shapes.get(name))
        raise DataError(f"{path} does not fit the model of this run: {differing[:4]} differ; the model was changed")


def _tensor(spec: TensorSpec, data: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(data).view(torch_type(spec)).view(spec.shape)
