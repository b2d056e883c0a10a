"""The optimisers of policy and value models, their learning-rate schedule, and a guard around each
step.

A step happens as a whole or not at all: loss and gradient norm are checked before the optimiser
touches anything. The saved state allows an exact resume."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch
from torch.distributed.tensor import DTensor
from transformers.optimization import get_wsd_schedule

from pipeline.process import work
from pipeline.training.spikes import NO_LIMITS, StepLimits
from protocol.errors import ConfigError, DataError
from workers.engines.model.checkpoint_files import (
    TRAINING_FILE,
    TRAINING_FORMAT,
    OptimizerState,
    TrainingState,
    read_optimizer,
    restore_rng,
    restored_state,
    snapshot_optimizer,
    sort_optimizer,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from pipeline.config.learning import LearnerSection, ValueSection


_FORMS: Final = {"linear": "linear", "cosine": "cosine", "warmup-stable-decay": "1-sqrt"}


@dataclass(frozen=True, slots=True)
class RateDecay:
    """The learning-rate schedule after the warm-up. Lengths are in optimiser steps."""

    kind: str = "constant"
    stable_steps: int = 0
    decay_steps: int = 0
    final_share: float = 0.0
    """Final rate as a share of the learning rate."""

    def share_after(self, num_steps: int) -> float:
        return 1.0 if self.kind == "constant" else _share_by_step(self)(max(0, num_steps))

    def __str__(self) -> str:
        if self.kind == "constant":
            return self.kind
        return f"{self.kind} ({self.stable_steps} + {self.decay_steps} steps, to {self.final_share:g})"


CONSTANT: Final = RateDecay()


@cache
def _share_by_step(decay: RateDecay) -> Callable[[int], float]:
    # only the schedule's function is used; a dummy optimiser carries it
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)])
    schedule = get_wsd_schedule(
        optimizer,
        num_warmup_steps=0,
        num_stable_steps=decay.stable_steps,
        num_decay_steps=decay.decay_steps,
        decay_type=_FORMS[decay.kind],
        min_lr_ratio=decay.final_share,
    )
    return schedule.lr_lambdas[0]


_MAX_NAMED = 4


class OptimizerTraits(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def learning_rate(self) -> float: ...

    @property
    def weight_decay(self) -> float: ...

    @property
    def betas(self) -> tuple[float, float]: ...

    @property
    def eps(self) -> float: ...

    @property
    def no_decay(self) -> tuple[str, ...]: ...


def make_optimizers(
    parameters: Mapping[str, torch.nn.Parameter], settings: OptimizerTraits, embeddings: Collection[str] = ()
) -> list[torch.optim.Optimizer]:
    """Build the optimisers of ``parameters``; each parameter belongs to one of them.

    ``embeddings`` names the matrices whose rows are tokens, for which Muon is not meant."""
    if settings.name != "muon":
        return [_make(settings.name, parameters, settings)]
    hidden = {name: value for name, value in parameters.items() if value.ndim == 2 and name not in embeddings}
    rest = {name: value for name, value in parameters.items() if name not in hidden}
    return [_make(kind, part, settings) for kind, part in (("muon", hidden), ("adamw-fused", rest)) if part]


def make_adamw(
    parameters: Mapping[str, torch.nn.Parameter], settings: OptimizerTraits, *, fused: bool = True
) -> torch.optim.AdamW:
    groups = _groups(parameters, settings)
    return torch.optim.AdamW(
        groups, lr=settings.learning_rate, betas=settings.betas, eps=settings.eps, fused=True if fused else None
    )


def named(names: Iterable[str], patterns: Collection[str]) -> list[str]:
    """Return the ``names`` that match one of the patterns; ``*`` matches any text."""
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]


def check_patterns(setting: str, patterns: Collection[str], names: Collection[str]) -> None:
    """Raise ConfigError for a pattern that matches nothing or freezes everything."""
    for pattern in patterns:
        if not named(names, [pattern]):
            some = ", ".join([*names][:_MAX_NAMED])
            raise ConfigError(
                f"{setting} has {pattern!r}, which matches none of the model's {len(names)} parameters ({some}, ...); correct "
                "it: * matches any text, and a tied head has its embedding's name"
            )
    if setting.endswith("freeze") and len(named(names, patterns)) == len(names):
        raise ConfigError(f"{setting} matches all {len(names)} parameters, so nothing would be trained; leave some out")


def freeze(model: PreTrainedModel, patterns: Collection[str]) -> None:
    """Exclude parameters from training. Raises ConfigError for a pattern that matches none."""
    names = [name for name, _ in model.named_parameters()]
    check_patterns("learner.freeze", patterns, names)
    for name in named(names, patterns):
        model.get_parameter(name).requires_grad_(False)


def embedding_names(model: PreTrainedModel) -> frozenset[str]:
    modules = (model.get_input_embeddings(), model.get_output_embeddings())
    ids = {id(value) for module in modules if module is not None for value in module.parameters()}
    return frozenset(name for name, value in model.named_parameters() if id(value) in ids)


def _make(name: str, parameters: Mapping[str, torch.nn.Parameter], settings: OptimizerTraits) -> torch.optim.Optimizer:
    match name:
        case "adafactor":
            return torch.optim.Adafactor(_groups(parameters, settings), lr=settings.learning_rate)
        case "muon":
            return torch.optim.Muon(
                _groups(parameters, settings), lr=settings.learning_rate, adjust_lr_fn="match_rms_adamw"
            )
        case "adamw-8bit":
            return _adamw_8bit()(
                _groups(parameters, settings), lr=settings.learning_rate, betas=settings.betas, eps=settings.eps
            )
        case _:
            return make_adamw(parameters, settings, fused=name == "adamw-fused")


def _adamw_8bit() -> Any:
    try:
        from bitsandbytes.optim.adamw import AdamW8bit  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ConfigError(
            f"learner.optimizer is adamw-8bit, but bitsandbytes cannot be imported: {error}; install "
            "'headrace[bitsandbytes]', or set learner.optimizer to adamw-fused"
        ) from error
    return AdamW8bit


def _groups(parameters: Mapping[str, torch.nn.Parameter], settings: OptimizerTraits) -> list[dict[str, Any]]:
    excepted = set(named(parameters, settings.no_decay))
    decayed = [value for name, value in parameters.items() if value.ndim >= 2 and name not in excepted]
    others = [value for name, value in parameters.items() if value.ndim < 2 or name in excepted]
    return [
        {"params": part, "weight_decay": decay}
        for values, decay in ((decayed, settings.weight_decay), (others, 0.0))
        for part in _alike(values) or [[]]
    ]


def _alike(values: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Part tensors by the ranks that they are split over: torch computes together on those of one mesh alone."""
    parts: dict[Any, list[torch.Tensor]] = {}
    for value in values:
        parts.setdefault(value.device_mesh if isinstance(value, DTensor) else None, []).append(value)
    return list(parts.values())


GRADIENT = 0.95
"""Rough share of an optimiser step's time spent on the gradient, for progress marks."""


@dataclass(frozen=True, slots=True)
class OptimizerSettings:
    learning_rate: float
    """After the warm-up."""
    warmup_steps: int = 0
    """Step k (from 1) of the warm-up uses k / warmup_steps of the rate."""
    weight_decay: float = 0.0
    """Decoupled; on matrices only, never on norms and biases."""
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    max_grad_norm: float = 1.0
    """Longer gradients are scaled down to this global norm."""
    name: str = "adamw-fused"
    """One of the names that ``learner.optimizer`` takes."""
    decay: RateDecay = CONSTANT
    no_decay: tuple[str, ...] = ()
    """Name patterns of matrices without weight decay."""

    @classmethod
    def of(
        cls,
        section: LearnerSection | ValueSection,
        *,
        warmup_steps: int,
        name: str = "adamw-fused",
        decay: RateDecay = CONSTANT,
        no_decay: tuple[str, ...] = (),
    ) -> OptimizerSettings:
        return cls(
            name=name,
            decay=decay,
            no_decay=no_decay,
            learning_rate=section.learning_rate,
            warmup_steps=warmup_steps,
            weight_decay=section.weight_decay,
            betas=section.betas,
            eps=section.adam_eps,
            max_grad_norm=section.max_grad_norm,
        )

    def rate_after(self, num_steps: int) -> float:
        """Return the rate of the step that follows ``num_steps``: linear warm-up, then decay."""
        share = (num_steps + 1) / self.warmup_steps if self.warmup_steps else 1.0
        return self.learning_rate * min(1.0, share) * self.decay.share_after(num_steps - self.warmup_steps)

    def training_state(self, num_steps: int) -> TrainingState:
        # fused and unfused have the same state
        family = "adamw" if self.name == "adamw-fused" else self.name
        return TrainingState(TRAINING_FORMAT, num_steps, optimizer=family, schedule=str(self.decay))

    def check_state(self, state: TrainingState, folder: Path) -> None:
        """Raise DataError, naming the file, when another optimiser or schedule wrote ``state``."""
        own = self.training_state(state.num_steps)
        for what, got, expected in (
            ("optimizer", state.optimizer, own.optimizer),
            ("schedule", state.schedule, own.schedule),
        ):
            if got != expected:
                raise DataError(
                    f"{folder / TRAINING_FILE} has {what} {got}, expected {expected}; set learner.{what} and its lengths as "
                    "they were, or start a new run with model.path at this checkpoint's model"
                )


@dataclass(frozen=True, slots=True)
class AppliedStep:
    applied: bool
    """False when loss or gradient was not finite or above its limit; then nothing changed."""
    grad_norm: float
    """Before clipping."""
    learning_rate: float


class GuardedOptimizer:
    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        settings: OptimizerSettings,
        embeddings: Collection[str] = (),
        total_norm: Callable[[], torch.Tensor] | None = None,
    ) -> None:
        """``embeddings`` names the parameters whose rows are tokens. ``total_norm`` is the norm of all gradients, where
        other processes have more of them."""
        self._parameters = dict(parameters)
        self._total_norm = total_norm or self._own_norm
        self._settings = settings
        self._optimizers = make_optimizers(self._parameters, settings, embeddings)
        self._owners = {
            id(parameter): optimizer
            for optimizer in self._optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        self.num_steps = 0
        """Steps applied since the start of the run, including before a resume."""

    def set_learning_rate(self, learning_rate: float) -> None:
        """Use another rate after the warm-up from now on; state and step count stay."""
        self._settings = replace(self._settings, learning_rate=learning_rate)

    def step(self, loss: float, limits: StepLimits = NO_LIMITS) -> AppliedStep:
        """Take a step if the gradients and ``loss`` are finite and within ``limits``."""
        norm = self._total_norm()
        grad_norm = float(norm)
        work.step()
        learning_rate = self._settings.rate_after(self.num_steps)
        applied = limits.allow(loss, grad_norm)
        if applied:
            for part in _alike(self._parameters.values()):
                torch.nn.utils.clip_grads_with_norm_(part, self._settings.max_grad_norm, norm)
            for optimizer in self._optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = learning_rate
                optimizer.step()
            work.step()
            self.num_steps += 1
        return AppliedStep(applied, grad_norm, learning_rate)

    def _own_norm(self) -> torch.Tensor:
        parts = _alike(p.grad for p in self._parameters.values() if p.grad is not None)
        norms = [torch.nn.utils.get_total_norm(part) for part in parts]
        # the gradients are sharded over ranks
        whole = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
        return whole[0] if len(whole) == 1 else torch.nn.utils.get_total_norm(whole)

    def clear(self) -> None:
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none=True)

    def state_of(self, name: str) -> dict[str, torch.Tensor]:
        """Return a parameter's live state, which may be changed; empty before its first step."""
        parameter = self._parameters[name]
        return self._owners[id(parameter)].state[parameter]

    def forget(self, num_steps: int) -> None:
        """Drop all state, and set the step count."""
        for optimizer in self._optimizers:
            optimizer.state.clear()
        self.num_steps = num_steps

    @property
    def states(self) -> dict[str, dict[str, torch.Tensor | int]]:
        """Live state by parameter name; empty for a parameter before its first step."""
        return {name: self._owners[id(value)].state.get(value, {}) for name, value in self._parameters.items()}

    @property
    def training_state(self) -> TrainingState:
        return self._settings.training_state(self.num_steps)

    def snapshot(self) -> Callable[[Path], None]:
        return snapshot_optimizer(self.states, self.training_state)

    def read(self, folder: Path, state: TrainingState) -> OptimizerState:
        """Read a :meth:`snapshot`, changing nothing. Raises DataError naming the file."""
        self._settings.check_state(state, folder)
        return read_optimizer(self._shapes, folder)

    def sort(self, tensors: Mapping[str, torch.Tensor], state: TrainingState, path: Path) -> OptimizerState:
        """Group tensors by parameter, changing nothing. Raises DataError."""
        self._settings.check_state(state, path)
        return sort_optimizer(tensors, self._shapes, path)

    @property
    def _shapes(self) -> dict[str, torch.Size]:
        return {name: value.shape for name, value in self._parameters.items()}

    def restore(self, read: OptimizerState, state: TrainingState) -> None:
        """Restore the state, so that the next step equals that of the uninterrupted run."""
        states, rng = read
        self.forget(state.num_steps)
        for name, kept in states.items():
            parameter = self._parameters[name]
            owner = self._owners[id(parameter)]
            owner.state[parameter] = restored_state(kept, parameter.device, fused=bool(owner.defaults.get("fused")))
        restore_rng(rng)
