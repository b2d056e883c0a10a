"""A model and its optimiser in shares: the Protocol of shares, and operations on any of them.

Gathered weights, snapshots and loads use the files of the single-process backend
(``workers.engines.model.checkpoint_files``). So a checkpoint goes on under another number of ranks,
and under another backend.

Only rank 0 touches files. It reads and checks a whole checkpoint before it sends a command, so that
a damaged one changes nothing anywhere. One full tensor at a time goes over the group."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch

from protocol.errors import EngineError
from workers.engines.model.checkpoint_files import (
    copy_to_host,
    model_writer,
    optimizer_writer,
    read_model,
    read_optimizer,
    read_training_state,
    restore_rng,
    snapshot_writer,
    weight_owners,
)
from workers.engines.model.optimizer import AppliedStep, OptimizerSettings
from workers.engines.training.ranks.group import Group
from workers.engines.training.ranks.lead import Lead
from workers.engines.training.ranks.messages import Command, Gather, Put

if TYPE_CHECKING:
    from transformers import PreTrainedModel

STEP = "step"
"""AdamW's count of steps: one number, kept with every parameter."""


class Shards(Protocol):
    """One rank's share of a model and its optimiser. All ranks call each method in one order."""

    @property
    def num_steps(self) -> int:
        """Optimiser steps applied since the start of the run, over resumes."""
        ...

    @property
    def module(self) -> torch.nn.Module:
        """The module that is called for a forward pass."""
        ...

    @property
    def averages_gradients(self) -> bool:
        """Whether the gradients of the ranks are averaged, not added up."""
        ...

    def backward(self, loss: torch.Tensor, total: torch.Tensor | None) -> None:
        """Add a micro-batch's gradient; ``total``, with the last, is this rank's summed loss."""
        ...

    def step(self, loss: float) -> AppliedStep:
        """Step along the gradients, if they and the whole batch's ``loss`` are finite."""
        ...

    def clear(self) -> None:
        """Forget the gradients."""
        ...

    def weight(self, name: str) -> torch.Tensor:
        """Return a whole parameter, on any device; it may be the live one."""
        ...

    def state(self, name: str, key: str) -> torch.Tensor:
        """Return a parameter's whole optimiser state of one kind, ``exp_avg`` or ``exp_avg_sq``."""
        ...

    def put_weight(self, name: str, value: torch.Tensor) -> None:
        """Set a parameter from its whole value, which is the same on every rank."""
        ...

    def begin_states(self, num_steps: int) -> None:
        """Forget all optimiser state after ``num_steps`` steps: moments are 0 until put."""
        ...

    def put_state(self, name: str, key: str, value: torch.Tensor) -> None:
        """Set a parameter's state of one kind from its whole value, the same on every rank."""
        ...


@dataclass(frozen=True, slots=True)
class Gathered:
    """Whole tensors on the host; of other ranks than 0, nothing."""

    weights: dict[str, torch.Tensor]
    """By owner's name, in the order of the model's state."""
    states: dict[str, torch.Tensor]
    """``<state>/<parameter>``, as checkpoints name them."""
    num_steps: int


@dataclass(frozen=True, slots=True)
class _Loaded:
    weights: Mapping[str, torch.Tensor]
    states: Mapping[str, Mapping[str, torch.Tensor]]


class ShardedModel:
    """Gathers, saves and loads a model in shares."""

    def __init__(
        self,
        skeleton: PreTrainedModel,
        shards: Shards,
        settings: OptimizerSettings,
        group: Group,
        lead: Lead,
        *,
        tokenizer_from: Path | None,
    ) -> None:
        """Take care of this rank's ``shards``; ``skeleton`` is the same model on no device."""
        self._skeleton = skeleton
        self.shards = shards
        self._settings = settings
        self.group = group
        self.lead = lead
        self._tokenizer_from = tokenizer_from
        self._shapes = {name: tensor.shape for name, tensor in skeleton.state_dict(keep_vars=True).items()}
        self._names = list(dict.fromkeys(weight_owners(skeleton).values()))
        self._trained = {name for name, parameter in skeleton.named_parameters() if parameter.requires_grad}
        self._loaded: _Loaded | None = None

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Gather the weights, then yield them by name, tied ones once: copies, on the CPU."""
        yield from self._gather(with_optimizer=False).weights.items()

    def snapshot(self) -> Callable[[Path], None]:
        """Gather the state of an exact resume; return its writer, by the seam's contract."""
        gathered = self._gather(with_optimizer=True)
        write_model = model_writer(self._skeleton, gathered.weights, self._tokenizer_from)
        write_optimizer = optimizer_writer(gathered.states, self._settings.training_state(gathered.num_steps))

        return snapshot_writer(write_model, write_optimizer)

    def load(self, folder: Path) -> None:
        """Take back any backend's snapshot. On DataError, naming the file, nothing has changed."""
        state = read_training_state(folder)
        self._settings.check_state(state, folder)
        weights = read_model(self._skeleton, folder)
        parameters = {name: tensor for name, tensor in self._skeleton.named_parameters() if name in self._trained}
        states, rng = read_optimizer(parameters, folder)
        kinds: dict[str, list[str]] = {}
        for name, kept in states.items():
            for key in kept:
                kinds.setdefault(key, []).append(name)
        kinds.pop(STEP, None)
        self._loaded = _Loaded(weights, states)
        try:
            self.lead.run(Put(state.num_steps, kinds), self.obey)
        finally:
            self._loaded = None
        restore_rng(rng)

    def obey(self, command: Command) -> Gathered:
        """Carry out a command on weights, with all ranks. Raises EngineError for another one."""
        match command:
            case Gather():
                return self._bring_together(with_optimizer=command.with_optimizer)
            case Put():
                self._share_out(command.num_steps, command.states)
                return Gathered({}, {}, command.num_steps)
            case _:
                raise EngineError(f"ranks received {type(command).__name__}, which is not for this model")

    def _gather(self, *, with_optimizer: bool) -> Gathered:
        return self.lead.run(Gather(with_optimizer), self.obey)

    def _bring_together(self, *, with_optimizer: bool) -> Gathered:
        shards = self.shards
        gathered = Gathered({}, {}, shards.num_steps)
        for name in self._names:
            value = shards.weight(name)
            if self.group.is_lead:
                gathered.weights[name] = copy_to_host(value)
        if not with_optimizer or not shards.num_steps:
            return gathered
        for name in self._names:
            if name not in self._trained:
                continue
            for key in ("exp_avg", "exp_avg_sq"):
                value = shards.state(name, key)
                if self.group.is_lead:
                    gathered.states[f"{key}/{name}"] = copy_to_host(value)
            gathered.states[f"{STEP}/{name}"] = torch.tensor(float(shards.num_steps))
        return gathered

    def _share_out(self, num_steps: int, kinds: Mapping[str, list[str]]) -> None:
        loaded = self._loaded
        for name in self._names:
            self.shards.put_weight(name, self._from_lead(name, loaded.weights[name] if loaded else None))
        self.shards.begin_states(num_steps)
        for key, names in sorted(kinds.items()):
            for name in names:
                self.shards.put_state(name, key, self._from_lead(name, loaded.states[name][key] if loaded else None))

    def _from_lead(self, name: str, value: torch.Tensor | None) -> torch.Tensor:
        dtype = self._skeleton.dtype
        if value is None:
            return self.group.broadcast(torch.empty(self._shapes[name], dtype=dtype))
        return self.group.broadcast(value.to(dtype).contiguous())
