"""Marks progress of long work on a model, layer by layer (``pipeline.process.work``).

A mark is made at the end of every layer, forward and backward. Every loaded tensor and every saved
file makes one too. The computation stays the same."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, cast

import torch
from transformers.modeling_layers import GradientCheckpointingLayer

from pipeline.process import work
from protocol.errors import EngineError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FORWARD = 1.0 / 3.0
"""Share of the forward pass in forward and backward: backward computes twice as much."""

_ATTENTION_LAYERS = {"full_attention", "sliding_attention", "attention"}


def attend_by(attention: str, model: PreTrainedModel, *, unfit: str, verb: str, refusal: str) -> PreTrainedModel:
    """Make ``model`` call a registered attention, and count its layers, from now on; return it.
    Raises EngineError when it mixes tokens by more than transformers' attention interface."""
    kinds = set(getattr(model.config, "layer_types", None) or ()) - _ATTENTION_LAYERS
    if kinds:
        raise EngineError(
            f"{type(model).__name__} has layers of kind {', '.join(sorted(kinds))}, which {unfit}; "
            f"only {', '.join(sorted(_ATTENTION_LAYERS))} layers can be {verb}: choose another model"
        )
    model.set_attn_implementation(attention)
    if model.config._attn_implementation != attention:
        raise EngineError(
            f"{type(model).__name__} does not call attention through transformers' AttentionInterface, so {refusal}; "
            "choose another model (Qwen2, Qwen3 and Llama do)"
        )
    return count_layers(model)


def count_layers(model: PreTrainedModel) -> PreTrainedModel:
    """Make every layer of ``model`` mark the end of each pass through it; return the model."""
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]

    def passed(_module: torch.nn.Module, _inputs: object, output: Any) -> None:
        count_part(output[0] if isinstance(output, tuple) else output, 1.0 / len(layers))

    for layer in layers:
        layer.register_forward_hook(passed)
    return model


def count_part(output: object, share: float) -> None:
    """Mark that ``share`` of a forward pass has made ``output``, and later its backward pass."""
    # a backward pass may run on a thread of its own
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
    """A progress bar of transformers that counts."""

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
