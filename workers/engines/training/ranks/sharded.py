"""A sharded model with its optimiser: the Protocol of shards, and gathering, snapshots and loads
for any of them.

Files are those of the single-process backend (``workers.engines.model.checkpoint_files``), so a
checkpoint can be resumed with another number of ranks and another backend.

Only rank 0 touches files. It reads and checks a whole checkpoint before it sends a command, so a
damaged one changes nothing anywhere. Whole tensors are sent one at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from pipeline.training.live_states import LiveState
from pipeline.training.snapshots import KeptState
from pipeline.training.spikes import NO_LIMITS, StepLimits
from protocol.errors import EngineError
from workers.engines.model.adapter import Adapter
from workers.engines.model.checkpoint_files import (
    STEP,
    OptimizerState,
    TrainingState,
    copy_to_host,
    optimizer_writer,
    read_optimizer,
    read_training_state,
    restore_rng,
    rng_tensors,
    snapshot_writer,
    sort_optimizer,
)
from workers.engines.model.live_state import StateCopier, check_weights, read_kept
from workers.engines.model.optimizer import AppliedStep, OptimizerSettings
from workers.engines.training.ranks.group import Group
from workers.engines.training.ranks.lending import LentShards, ShareLender
from workers.engines.training.ranks.messages import Command, Gather, Lead, Lend, Put
from workers.engines.training.trained_weights import WeightsForm


class Shards(LentShards, Protocol):
    """One rank's share of a model and its optimiser. All ranks call the methods in the same order."""

    @property
    def lends(self) -> bool:
        """Whether ``piece`` covers the whole share; otherwise a snapshot gathers it."""
        ...

    @property
    def module(self) -> torch.nn.Module: ...

    @property
    def averages_gradients(self) -> bool:
        """Whether gradients are averaged over the ranks instead of summed."""
        ...

    def backward(self, loss: torch.Tensor, total: torch.Tensor | None) -> None:
        """Add a micro-batch's gradient; with the last one, ``total`` is this rank's summed loss."""
        ...

    def step(self, loss: float, limits: StepLimits = NO_LIMITS) -> AppliedStep:
        """Take a step if the gradients and the whole batch's ``loss`` are finite and within
        ``limits``."""
        ...

    def set_learning_rate(self, learning_rate: float) -> None: ...

    def clear(self) -> None: ...

    def weight(self, name: str) -> torch.Tensor | None:
        """Return a whole parameter on rank 0, on any device; it may be the live one. Other ranks may get None."""
        ...

    def state(self, name: str, key: str) -> torch.Tensor | None:
        """Return a parameter's whole optimiser state of a kind other than :data:`STEP` on rank 0, as ``weight``."""
        ...

    def put_weight(self, name: str, value: torch.Tensor) -> None:
        """Set a parameter from its whole value, which is the same on every rank."""
        ...

    def begin_states(self, num_steps: int) -> None:
        """Reset all optimiser state to zero, as of ``num_steps`` steps."""
        ...

    def put_state(self, name: str, key: str, value: torch.Tensor) -> None:
        """Set a parameter's state of one kind from its whole value, the same on every rank."""
        ...


@dataclass(frozen=True, slots=True)
class Gathered:
    """Whole tensors on the host; empty on ranks other than 0."""

    weights: dict[str, torch.Tensor]
    states: dict[str, torch.Tensor]
    num_steps: int


@dataclass(frozen=True, slots=True)
class _Loaded:
    weights: Mapping[str, torch.Tensor]
    states: Mapping[str, Mapping[str, torch.Tensor]]


class ShardedModel:
    def __init__(
        self,
        form: WeightsForm,
        shards: Shards,
        settings: OptimizerSettings,
        group: Group,
        lead: Lead,
        *,
        trained: Iterable[str],
        dtype: torch.dtype,
    ) -> None:
        """Only the ``trained`` tensors of ``form`` are stepped."""
        self._form = form
        self.shards = shards
        self._settings = settings
        self.group = group
        self.lead = lead
        self._trained = set(trained)
        self._dtype = dtype
        self._loaded: _Loaded | None = None
        self._copier = StateCopier()
        shapes = {name: self._form.shapes[name] for name in self._changing}
        self._lender = ShareLender(shards, group, lead, shapes=shapes, dtype=dtype)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._form.published(self._gather(self._form.names).weights)

    def adapter(self) -> Adapter | None:
        """Gather the adapter, if there is one; the frozen weights are gathered only when read."""
        names = list(self._form.adapter_names)
        if not names:
            return None
        rest = [name for name in self._form.names if name not in set(names)]
        return self._form.adapter(self._gather(names).weights, lambda: self._gather(rest).weights)

    def snapshot(self) -> Callable[[Path], None]:
        gathered = self._gather(self._form.names, with_optimizer=True)
        write_model = self._form.writer(gathered.weights)
        write_optimizer = optimizer_writer(gathered.states, self._settings.training_state(gathered.num_steps))

        return snapshot_writer(write_model, write_optimizer)

    def load(self, folder: Path) -> None:
        state = read_training_state(folder)
        self._settings.check_state(state, folder)
        weights = self._form.read(folder)
        self._put(weights, read_optimizer(self._trained_shapes, folder), state)

    def live_state(self) -> LiveState:
        """Return state to be lent by all ranks, or copies if shards cannot be lent."""
        if self.shards.lends:
            return self._lender.live_state(self._settings.training_state(self.shards.num_steps), self.obey)
        gathered = self._gather(self._changing, with_optimizer=True)
        state = self._settings.training_state(gathered.num_steps)
        # nothing waits for a loan of copies
        return self._copier.live_state(gathered.weights, gathered.states | rng_tensors(), state)

    def wait_for_loans(self) -> None:
        """Wait, on each rank, until everything that it has lent is copied. Raises EngineDied."""
        self._lender.loans.wait()

    def put_back(self, kept: KeptState) -> None:
        state, weights, states = read_kept(kept)
        self._settings.check_state(state, kept.path)
        check_weights(weights, {name: self._form.shapes[name] for name in self._changing}, kept.path)
        self._put(weights, sort_optimizer(states, self._trained_shapes, kept.path), state)

    @property
    def _trained_shapes(self) -> dict[str, torch.Size]:
        return {name: self._form.shapes[name] for name in self._trained}

    @property
    def _changing(self) -> list[str]:
        return [name for name in self._form.names if name in self._trained]

    def _put(self, weights: Mapping[str, torch.Tensor], optimizer: OptimizerState, state: TrainingState) -> None:
        states, rng = optimizer
        kinds: dict[str, list[str]] = {}
        for name, kept in states.items():
            for key in kept:
                kinds.setdefault(key, []).append(name)
        self._loaded = _Loaded(weights, states)
        try:
            self.lead.run(Put(state.num_steps, list(weights), kinds), self.obey)
        finally:
            self._loaded = None
        restore_rng(rng)

    def obey(self, command: Command) -> Gathered:
        """Raises EngineError for a command that is not about weights."""
        match command:
            case Gather():
                return self._bring_together(command.names, with_optimizer=command.with_optimizer)
            case Lend():
                self._lender.lend(command)
                return Gathered({}, {}, self.shards.num_steps)
            case Put():
                self._share_out(command)
                return Gathered({}, {}, command.num_steps)
            case _:
                raise EngineError(f"ranks received {type(command).__name__}, which is not for this model")

    def _gather(self, names: Sequence[str], *, with_optimizer: bool = False) -> Gathered:
        return self.lead.run(Gather(list(names), with_optimizer), self.obey)

    def _bring_together(self, names: Sequence[str], *, with_optimizer: bool) -> Gathered:
        shards = self.shards
        gathered = Gathered({}, {}, shards.num_steps)
        for name in names:
            value = shards.weight(name)
            if self.group.is_lead:
                assert value is not None, "rank 0 gets whole tensors"
                gathered.weights[name] = copy_to_host(value)
        if not with_optimizer or not shards.num_steps:
            return gathered
        for name in (name for name in names if name in self._trained):
            for key in shards.kinds(name):
                value = torch.tensor(float(shards.num_steps)) if key == STEP else shards.state(name, key)
                if self.group.is_lead:
                    assert value is not None, "rank 0 gets whole tensors"
                    gathered.states[f"{key}/{name}"] = copy_to_host(value)
        return gathered

    def _share_out(self, command: Put) -> None:
        loaded = self._loaded
        self.wait_for_loans()
        for name in command.weights:
            self.shards.put_weight(name, self._from_lead(name, loaded.weights[name] if loaded else None))
        self.shards.begin_states(command.num_steps)
        for key, names in sorted(command.states.items()):
            for name in names:
                if key == STEP:
                    value = torch.tensor(float(command.num_steps))
                else:
                    value = self._from_lead(name, loaded.states[name][key] if loaded else None)
                self.shards.put_state(name, key, value)

    def _from_lead(self, name: str, value: torch.Tensor | None) -> torch.Tensor:
        if value is None:
            return self.group.broadcast(torch.empty(self._form.shapes[name], dtype=self._dtype))
        return self.group.broadcast(value.to(self._dtype).contiguous())
