"""Shards of a pipeline: each rank has the whole weights of its stages, and steps them itself.

A head that is tied to the embedding is on the first and on the last stage's rank. Both add up their gradients, and so
take the same step."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
import torch.distributed as dist

from pipeline.training.spikes import NO_LIMITS, StepLimits
from protocol.errors import EngineError
from workers.engines.model.checkpoint_files import STEP
from workers.engines.model.optimizer import AppliedStep, GuardedOptimizer, OptimizerSettings
from workers.engines.model.packed import PackedTokens
from workers.engines.training.ranks.group import Group
from workers.engines.training.ranks.lending import ShareRange
from workers.engines.training.ranks.stages.cut import Stage
from workers.engines.training.ranks.whole import WholeTensors

_ADAMW = (STEP, "exp_avg", "exp_avg_sq")


class PipelineShards:
    averages_gradients = False
    lends = True

    def __init__(
        self,
        model: torch.nn.Module,
        stages: Sequence[Stage],
        ranks: Sequence[int],
        settings: OptimizerSettings,
        group: Group,
        embeddings: Collection[str] = (),
    ) -> None:
        """Keep the stages of this rank; ``model``, whole on every rank, loses the weights of all others.

        ``ranks`` has the rank of each stage. ``embeddings`` names the parameters whose rows are tokens."""
        self._group, self._ranks = group, ranks
        whole = dict(model.named_parameters())
        names = {id(parameter): name for name, parameter in whole.items()}
        self._holders: dict[str, list[int]] = {}
        for stage, rank in zip(stages, ranks, strict=True):
            for name in (names[id(parameter)] for parameter in stage.parameters()):
                holders = self._holders.setdefault(name, [])
                if rank not in holders:
                    holders.append(rank)
        if missing := sorted(whole.keys() - self._holders.keys()):
            raise EngineError(f"{missing[:4]} are in no stage of the model; set learner.backend to fsdp2")
        self._parameters = {name: whole[name] for name, holders in self._holders.items() if group.rank in holders}
        self._shapes = {name: parameter.shape for name, parameter in whole.items()}
        self._trained = {name for name, parameter in whole.items() if parameter.requires_grad}
        self._dtype = next(iter(whole.values())).dtype
        _drop(model, {id(parameter) for parameter in self._parameters.values()}, group.device)
        self.stages = {stage.index: stage for stage, rank in zip(stages, ranks, strict=True) if rank == group.rank}
        self.module = _Chain(self.stages, ranks, group)
        self._buffers = dict(model.named_buffers())
        own = {name: parameter for name, parameter in self._parameters.items() if name in self._trained}
        self._whole = WholeTensors(group)
        self._optimizer = GuardedOptimizer(own, settings, embeddings, total_norm=self._norm)

    @property
    def num_steps(self) -> int:
        return self._optimizer.num_steps

    def backward(self, loss: torch.Tensor, total: torch.Tensor | None) -> None:
        raise EngineError("a pipeline has its own order of backward passes")

    def set_learning_rate(self, learning_rate: float) -> None:
        self._optimizer.set_learning_rate(learning_rate)

    def step(self, loss: float, limits: StepLimits = NO_LIMITS) -> AppliedStep:
        self._join_gradients()
        return self._optimizer.step(loss, limits)

    def clear(self) -> None:
        self._optimizer.clear()

    def weight(self, name: str) -> torch.Tensor | None:
        return self._buffers[name] if name in self._buffers else self._on_lead(name)

    def kinds(self, name: str) -> Sequence[str]:
        return _ADAMW if name in self._trained else ()

    def state(self, name: str, key: str) -> torch.Tensor | None:
        return self._on_lead(name, key)

    @torch.no_grad()
    def piece(self, name: str, key: str = "") -> ShareRange | None:
        """Return a whole parameter or state on its first holder; None on all other ranks."""
        if self._holders[name][0] != self._group.rank:
            return None
        tensor = self._optimizer.state_of(name)[key] if key else self._parameters[name].detach()
        return ShareRange(0, tensor.flatten())

    @torch.no_grad()
    def put_weight(self, name: str, value: torch.Tensor) -> None:
        target = self._buffers.get(name, self._parameters.get(name))
        if target is not None:
            target.copy_(value)

    def begin_states(self, num_steps: int) -> None:
        self._optimizer.forget(num_steps)

    def put_state(self, name: str, key: str, value: torch.Tensor) -> None:
        parameter = self._parameters.get(name)
        if parameter is not None:
            self._optimizer.state_of(name)[key] = value.to(parameter.device, copy=True)

    def _on_lead(self, name: str, key: str = "") -> torch.Tensor | None:
        return self._whole.on_lead(name, self.piece(name, key), self._shapes[name], self._dtype)

    def _join_gradients(self) -> None:
        """Add the gradients of a parameter that two ranks have, on both: a + b is b + a to the last bit."""
        for name, holders in self._holders.items():
            if len(holders) == 1 or self._group.rank not in holders or name not in self._trained:
                continue
            (other,) = (rank for rank in holders if rank != self._group.rank)
            own = self._parameters[name].grad
            assert own is not None, "both ends of a pipeline have a gradient"
            theirs = torch.empty_like(own)
            exchange = [dist.P2POp(dist.isend, own, other), dist.P2POp(dist.irecv, theirs, other)]
            for sent in dist.batch_isend_irecv(exchange):
                sent.wait()
            own.add_(theirs)

    def _norm(self) -> torch.Tensor:
        """Return the norm of all ranks' gradients; one that two ranks have counts once."""
        own = [
            parameter.grad
            for name, parameter in self._parameters.items()
            if parameter.grad is not None and self._holders[name][0] == self._group.rank
        ]
        norm = torch.nn.utils.get_total_norm(own)
        return self._group.sum(norm.to(self._group.device, torch.float64).square()).sqrt().to(self._dtype)


class _Chain(torch.nn.Module):
    """All ranks' stages, one after another, for a pass without gradients."""

    def __init__(self, stages: dict[int, Stage], ranks: Sequence[int], group: Group) -> None:
        super().__init__()
        # not registered: they are the model's
        self._stages, self._ranks, self._group = stages, ranks, group

    def forward(self, batch: PackedTokens) -> torch.Tensor:
        """Return the log-probs [M] on the last stage's rank, and zeros on all others."""
        here, ranks, last = self._group.rank, self._ranks, len(self._ranks) - 1
        made: torch.Tensor | None = None
        for index, stage in sorted(self._stages.items()):
            if index and ranks[index - 1] != here:
                made = torch.empty(batch.tokens.numel(), stage.width, dtype=stage.dtype, device=self._group.device)
                dist.recv(made, ranks[index - 1])
            states: torch.Tensor = stage(made, batch)
            if index < last and ranks[index + 1] != here:
                dist.send(states.to(stage.dtype).contiguous(), ranks[index + 1])
            made = states
        assert made is not None, "every rank has a stage"
        return made if ranks[last] == here else torch.zeros(batch.targets.numel(), device=self._group.device)


def _drop(model: torch.nn.Module, kept: Collection[int], device: torch.device) -> None:
    """Move the parameters of these ids and all buffers to ``device``, and all other parameters to ``meta``."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if id(parameter) in kept:
                parameter.data = parameter.data.to(device)
            else:
                empty = torch.empty_like(parameter, device="meta")
                module._parameters[name] = torch.nn.Parameter(empty, parameter.requires_grad)
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = buffer.to(device)
