"""How the weights of a trained policy become published weights and checkpoints, and are read back.

A :class:`WeightsForm` maps the model's tensors to files. :class:`WholeForm` has only the policy's
own tensors, ``lora.AdapterForm`` an adapter. Whole tensors come from a live model
(:class:`TrainedModel`) or are gathered from ranks (``ranks.sharded``)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch

from workers.engines.model.adapter import Adapter
from workers.engines.model.checkpoint_files import copy_to_host, model_writer, read_model, weight_owners

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Weights = Mapping[str, torch.Tensor]
"""By name in the live model."""


class WeightsForm(Protocol):
    """Names a live model's tensors, tied ones once, and converts them to files."""

    @property
    def names(self) -> Sequence[str]: ...

    @property
    def shapes(self) -> Mapping[str, torch.Size]: ...

    @property
    def adapter_names(self) -> Sequence[str]: ...

    def published(self, weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the policy's weights, possibly the live ones, under the names that transformers reads."""
        ...

    def adapter(self, parts: Weights, below: Callable[[], Weights]) -> Adapter | None:
        """Return the adapter made of ``parts``, or None; ``below`` returns all other tensors."""
        ...

    def writer(self, weights: Weights) -> Callable[[Path], None]:
        """Return a function that writes ``weights``; it runs on any thread and may raise OSError."""
        ...

    def read(self, folder: Path) -> dict[str, torch.Tensor]:
        """Read the tensors that a load restores. Raises DataError naming the file."""
        ...


class WholeForm:
    """A model without an adapter: every tensor is the policy's own."""

    adapter_names = ()

    def __init__(self, model: PreTrainedModel, tokenizer_from: Path | None) -> None:
        self._model = model
        self._tokenizer_from = tokenizer_from
        self.names = list(dict.fromkeys(weight_owners(model).values()))
        state = model.state_dict(keep_vars=True)
        self.shapes = {name: state[name].shape for name in self.names}

    def published(self, weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
        for name in self.names:
            yield name, weights[name].detach()

    def adapter(self, parts: Weights, below: Callable[[], Weights]) -> None: ...

    def writer(self, weights: Weights) -> Callable[[Path], None]:
        return model_writer(self._model, weights, self._tokenizer_from)

    def read(self, folder: Path) -> dict[str, torch.Tensor]:
        found = read_model(self._model, folder)
        return {name: found[name] for name in self.names}


class TrainedModel:
    def __init__(self, model: PreTrainedModel, form: WeightsForm) -> None:
        self._model = model
        self._form = form
        self.parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self._form.published(self._live())

    def adapter(self) -> Adapter | None:
        return self._form.adapter(self._live(), self._live)

    def snapshot(self) -> Callable[[Path], None]:
        """Copy the weights; return a function that writes them on any thread and may raise OSError."""
        live, changing = self._live(), self.changing
        # frozen ones never change
        copies = {name: live[name].detach().to("cpu") for name in self._form.names if name not in changing}
        copies |= {name: copy_to_host(tensor) for name, tensor in changing.items()}
        return self._form.writer(copies)

    @cached_property
    def changing(self) -> dict[str, torch.Tensor]:
        """The live tensors that are not frozen, tied ones once; they change in place."""
        frozen = {name for name, parameter in self._model.named_parameters() if not parameter.requires_grad}
        live = self._live()
        return {name: live[name] for name in self._form.names if name not in frozen}

    def read(self, folder: Path) -> Callable[[], None]:
        """Read the weights; return a function that puts them in place. DataError names the file."""
        found = self._form.read(folder)

        def put() -> None:
            live = self._live()
            with torch.no_grad():
                for name, tensor in found.items():
                    live[name].copy_(tensor)

        return put

    def _live(self) -> dict[str, torch.Tensor]:
        return self._model.state_dict(keep_vars=True)
