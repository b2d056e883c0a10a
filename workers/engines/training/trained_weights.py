"""The trained part of a policy, which only the optimiser changes, and its way into files.

A :class:`WeightsForm` turns the tensors of the model that computes into published weights and
checkpoints, and reads them back. Here all tensors are the policy's own; ``lora.AdapterForm`` has an
adapter. Whole tensors come from a live model (:class:`TrainedModel`), or are gathered from ranks
(``ranks.sharded``)."""

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
"""By their names in the model that computes."""


class WeightsForm(Protocol):
    """The tensors of a model that computes, and what they become. Tied ones are named once."""

    @property
    def names(self) -> Sequence[str]:
        """All tensors, in the order of the model's state."""
        ...

    @property
    def shapes(self) -> Mapping[str, torch.Size]:
        """Of each tensor."""
        ...

    @property
    def adapter_names(self) -> Sequence[str]:
        """The tensors of an adapter; none where all are the policy's own."""
        ...

    def published(self, weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the policy's weights by the names that transformers reads, on the CPU."""
        ...

    def adapter(self, parts: Weights, below: Callable[[], Weights]) -> Adapter | None:
        """Return the adapter of ``parts``, above all other tensors, which ``below`` returns; None
        where all are the policy's own."""
        ...

    def writer(self, weights: Weights) -> Callable[[Path], None]:
        """Return a function that writes ``weights``, which may raise OSError on any thread."""
        ...

    def read(self, folder: Path) -> dict[str, torch.Tensor]:
        """Read the tensors that a load puts back. Raises DataError naming the file."""
        ...


class WholeForm:
    """Every tensor is the policy's own."""

    adapter_names = ()

    def __init__(self, model: PreTrainedModel, tokenizer_from: Path | None) -> None:
        """Take names and configuration of ``model``, which may be on no device."""
        self._model = model
        self._tokenizer_from = tokenizer_from
        self.names = list(dict.fromkeys(weight_owners(model).values()))
        state = model.state_dict(keep_vars=True)
        self.shapes = {name: state[name].shape for name in self.names}

    def published(self, weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield ``weights`` as they are."""
        for name in self.names:
            yield name, weights[name].detach().to("cpu")

    def adapter(self, parts: Weights, below: Callable[[], Weights]) -> None:
        """Return None: there is no adapter."""

    def writer(self, weights: Weights) -> Callable[[Path], None]:
        """Return the writer of ``model/``."""
        return model_writer(self._model, weights, self._tokenizer_from)

    def read(self, folder: Path) -> dict[str, torch.Tensor]:
        """Read ``model/``."""
        found = read_model(self._model, folder)
        return {name: found[name] for name in self.names}


class TrainedModel:
    """A live model, whole in this process."""

    def __init__(self, model: PreTrainedModel, form: WeightsForm) -> None:
        self._model = model
        self._form = form
        # by their names in the model that computes
        self.parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the policy's weights by name, on the CPU, tied ones once: live ones, or merged."""
        return self._form.published(self._live())

    def adapter(self) -> Adapter | None:
        """Return the live adapter, and the frozen weights below it, if there is one."""
        return self._form.adapter(self._live(), self._live)

    def snapshot(self) -> Callable[[Path], None]:
        """Copy the weights; return their writer, which runs on any thread and raises OSError."""
        live, changing = self._live(), self.changing
        # frozen ones never change
        copies = {name: live[name].detach().to("cpu") for name in self._form.names if name not in changing}
        copies |= {name: copy_to_host(tensor) for name, tensor in changing.items()}
        return self._form.writer(copies)

    @cached_property
    def changing(self) -> dict[str, torch.Tensor]:
        """The live tensors that are not frozen, tied ones once: they change in place."""
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
