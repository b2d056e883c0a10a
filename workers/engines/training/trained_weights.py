"""The trained part of a policy, which only the optimiser changes: here all of its weights.

``lora.AdaptedModel`` has the same methods."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from workers.engines.model.checkpoint_files import put_model, read_model, snapshot_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class WholeModel:
    """Every weight is trained."""

    def __init__(self, model: PreTrainedModel, tokenizer_from: Path | None) -> None:
        self._model = model
        self._tokenizer_from = tokenizer_from
        # by their names in the model that computes
        self.parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the policy's weights by name, on the CPU, tied ones once: the live ones."""
        seen: set[int] = set()
        for name, tensor in self._model.state_dict(keep_vars=True).items():
            if id(tensor) not in seen:
                seen.add(id(tensor))
                yield name, tensor.detach().to("cpu")

    def adapter(self) -> None:
        """There is none."""

    def snapshot(self) -> Callable[[Path], None]:
        """Copy the weights; return their writer, which runs on any thread and raises OSError."""
        return snapshot_model(self._model, self._tokenizer_from)

    def read(self, folder: Path) -> Callable[[], None]:
        """Read ``model/``; return a function that puts it in place. DataError names the file."""
        weights = read_model(self._model, folder)
        return lambda: put_model(self._model, weights)
