"""Hooks on a model's layers: progress marks (``pipeline.process.work``) and gradient checkpointing.

A mark is made at the end of every layer, forward and backward, and for every loaded tensor and
saved file. The computation does not change."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, cast

import torch
from transformers.modeling_layers import GradientCheckpointingLayer

from pipeline.process import work

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FORWARD = 1.0 / 3.0
"""Share of a forward and backward pass that is forward: backward computes twice as much."""


def recompute_layers(model: PreTrainedModel, layers: bool | int = True) -> bool:
    """Recompute the activations of the first ``layers`` (True: of all), without activating dropout;
    return whether that is more than before. A later ``eval()`` ends it.

    The first ones, because their turn in the backward pass comes when the activations that the
    others kept are gone."""
    found = _layers(model) if model.supports_gradient_checkpointing else []
    wanted = found if layers is True else found[:layers]
    more = any(not (module.gradient_checkpointing and module.training) for module in wanted)
    if more:
        model.gradient_checkpointing_enable()
        for module in found:
            module.gradient_checkpointing = module.training = module in wanted
    return more


def _layers(model: PreTrainedModel) -> list[GradientCheckpointingLayer]:
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def count_layers(model: PreTrainedModel) -> PreTrainedModel:
    """Make every layer of ``model`` mark the end of each pass through it; return the model."""
    layers = _layers(model)

    def passed(_module: torch.nn.Module, _inputs: object, output: Any) -> None:
        count_part(output[0] if isinstance(output, tuple) else output, 1.0 / len(layers))

    for layer in layers:
        layer.register_forward_hook(passed)
    return model


def count_part(output: object, share: float) -> None:
    """Mark ``share`` of a forward pass as done, and later the same share of the backward pass."""
    # the backward pass may run on another thread
    meter = work.current()
    if not isinstance(output, torch.Tensor) or not output.requires_grad:
        meter.step(share)
        return
    meter.step(FORWARD * share)

    def went_back(_gradient: torch.Tensor) -> None:
        meter.step((1.0 - FORWARD) * share)

    cast("Callable[[Callable[[torch.Tensor], None]], object]", output.register_hook)(went_back)


def count_files() -> None:
    """Make transformers mark each tensor it loads and file it saves, without progress bars."""
    from transformers.utils import logging

    # a worker's standard error is a log
    logging.disable_progress_bar()
    logging.set_tqdm_hook(lambda factory, args, kwargs: _CountingBar(factory(*args, **kwargs)))


class _CountingBar:
    def __init__(self, bar: Any) -> None:
        self._bar = bar

    def __iter__(self) -> Iterator[Any]:
        for item in cast("Iterable[Any]", self._bar):
            yield item
            work.step()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bar, name)

    def __enter__(self) -> Any:
        return self._bar.__enter__()

    def __exit__(self, *failure: object) -> Any:
        return self._bar.__exit__(*failure)
