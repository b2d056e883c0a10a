"""The trained part of a policy, which only the optimiser changes: all weights, or an adapter."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch

from workers.engines.model.checkpoint_files import put_model, read_model, snapshot_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from workers.engines.model.adapter import Adapter


class TrainedWeights(Protocol):
    """The weights of one policy."""

    @property
    def parameters(self) -> Mapping[str, torch.nn.Parameter]:
        """The trained parameters, by their names in the model that computes."""
        ...

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the policy's weights by name, on the CPU, tied ones once; maybe the live ones."""
        ...

    def adapter(self) -> Adapter | None:
        """Return the adapter on frozen weights, maybe the live one; None if all are trained."""
        ...

    def snapshot(self) -> Callable[[Path], None]:
        """Copy the state of an exact resume; return its writer, for any thread: it writes
        ``model/`` in Hugging Face format, and raises OSError."""
        ...

    def read(self, folder: Path) -> Callable[[], None]:
        """Read a snapshot; return a function that puts it in place. DataError names the file."""
        ...


class WholeModel:
    """Every weight is trained."""

    def __init__(self, model: PreTrainedModel, tokenizer_from: Path | None) -> None:
        self._model = model
        self._tokenizer_from = tokenizer_from
        self.parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the live weights."""
        seen: set[int] = set()
        for name, tensor in self._model.state_dict(keep_vars=True).items():
            if id(tensor) not in seen:
                seen.add(id(tensor))
                yield name, tensor.detach().to("cpu")

    def adapter(self) -> None:
        """There is none."""

    def snapshot(self) -> Callable[[Path], None]:
        """Copy the weights; return a function that writes ``model/``."""
        return snapshot_model(self._model, self._tokenizer_from)

    def read(self, folder: Path) -> Callable[[], None]:
        """Read ``model/``."""
        weights = read_model(self._model, folder)
        return lambda: put_model(self._model, weights)
