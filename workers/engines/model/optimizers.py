"""Optimisers by name, each from a maintained package, and which parameters they step.

    adamw-fused, adamw    torch.optim.AdamW (1711.05101)
    adamw-8bit            bitsandbytes.optim.AdamW8bit (2110.02861); tensors below 4096 numbers keep fp32 state
    adafactor             torch.optim.Adafactor (1804.04235); its rate is relative to a tensor's root mean square
    muon                  torch.optim.Muon for matrices inside the layers, its updates scaled to AdamW's root mean
                          square (2502.16982), so that one learning rate is right for both; fused AdamW for the rest

Weight decay acts on matrices, unless their names are excepted."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Protocol

import torch

from protocol.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_MAX_NAMED = 4


class OptimizerTraits(Protocol):
    """The settings of an optimiser: those that its steps are made with."""

    @property
    def name(self) -> str:
        """One of the module's names."""
        ...

    @property
    def learning_rate(self) -> float:
        """Rate after the warm-up."""
        ...

    @property
    def weight_decay(self) -> float:
        """Decoupled, on matrices only."""
        ...

    @property
    def betas(self) -> tuple[float, float]:
        """AdamW's."""
        ...

    @property
    def eps(self) -> float:
        """AdamW's."""
        ...

    @property
    def no_decay(self) -> tuple[str, ...]:
        """Patterns of the names of matrices that do not decay."""
        ...


def make_optimizers(
    parameters: Mapping[str, torch.nn.Parameter], settings: OptimizerTraits, embeddings: Collection[str] = ()
) -> list[torch.optim.Optimizer]:
    """Make the optimisers of ``parameters``, each stepped by one of them.

    ``embeddings`` are names of matrices whose rows are tokens, which Muon is not for."""
    if settings.name != "muon":
        return [_make(settings.name, parameters, settings)]
    hidden = {name: value for name, value in parameters.items() if value.ndim == 2 and name not in embeddings}
    rest = {name: value for name, value in parameters.items() if name not in hidden}
    return [_make(kind, part, settings) for kind, part in (("muon", hidden), ("adamw-fused", rest)) if part]


def make_adamw(
    parameters: Mapping[str, torch.nn.Parameter], settings: OptimizerTraits, *, fused: bool = True
) -> torch.optim.AdamW:
    """Make AdamW on ``parameters``, with weight decay on matrices only."""
    groups = _groups(parameters, settings)
    return torch.optim.AdamW(
        groups, lr=settings.learning_rate, betas=settings.betas, eps=settings.eps, fused=True if fused else None
    )


def named(names: Iterable[str], patterns: Collection[str]) -> list[str]:
    """Return those of ``names`` that one of the patterns fits; ``*`` stands for any text."""
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]


def check_patterns(setting: str, patterns: Collection[str], names: Collection[str]) -> None:
    """Raise ConfigError, naming the setting, for a pattern that fits nothing, or freezes all."""
    for pattern in patterns:
        if not named(names, [pattern]):
            some = ", ".join([*names][:_MAX_NAMED])
            raise ConfigError(
                f"{setting} has {pattern!r}, which fits none of the model's {len(names)} parameters ({some}, ...); correct "
                "it: * stands for any text, and a tied head has its embedding's name"
            )
    if setting.endswith("freeze") and len(named(names, patterns)) == len(names):
        raise ConfigError(f"{setting} fits all {len(names)} parameters, so nothing would be trained; leave some out")


def freeze(model: PreTrainedModel, patterns: Collection[str]) -> None:
    """Take parameters out of training. Raises ConfigError for a pattern that fits none."""
    names = [name for name, _ in model.named_parameters()]
    check_patterns("learner.freeze", patterns, names)
    for name in named(names, patterns):
        model.get_parameter(name).requires_grad_(False)


def embedding_names(model: PreTrainedModel) -> frozenset[str]:
    """Return the names of the parameters of input and output embeddings."""
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
    return [{"params": decayed, "weight_decay": settings.weight_decay}, {"params": others, "weight_decay": 0.0}]
