"""Trial passes of a model: whether another way of computing it agrees with transformers' own.

The truth is a pass over each sequence alone, by the model's own code with ``eager`` attention (the
other attention functions of transformers silently drop soft caps). Another way is correct if its
numbers are equal up to rounding. On ``meta`` there are no numbers, so only the calls are checked.

A short pass does not reveal everything, so calls are checked as well: our attention must have been
called once per layer, with a window in each layer that has one, and nothing else that mixes tokens
(such as a convolution along the row)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from protocol.errors import EngineError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

EAGER = "eager"
"""Attention as written in a model's own file."""

_LENGTHS = (9, 5)
_TOLERANCE = {torch.float64: 1e-4, torch.float32: 5e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""Largest relative difference of norms that rounding explains."""
_MIXES = (torch.nn.Conv1d,)
_ATTENTION_LAYERS = {"full_attention", "sliding_attention", "attention"}


def trial_tokens(model: PreTrainedModel) -> list[np.ndarray]:
    """Return int64 sequences of different lengths, the same for all models of one vocabulary size."""
    vocabulary = int(model.config.get_text_config().vocab_size)
    rng = np.random.default_rng(0)
    return [rng.integers(0, vocabulary, length) for length in _LENGTHS]


def attend_eagerly(model: PreTrainedModel) -> None:
    if model.config._attn_implementation not in (None, EAGER):
        model.set_attn_implementation(EAGER)


def backbone(model: PreTrainedModel) -> torch.nn.Module:
    """Return a model without its head. Raises EngineError if the model does not name it."""
    base = model.base_model
    if base is model:
        # Llama 4's base_model_prefix names an attribute that it does not have
        base = getattr(model, "model", None)
    if not isinstance(base, torch.nn.Module):
        raise EngineError(f"{type(model).__name__} has no named backbone apart from its head; choose another model")
    return base


@torch.no_grad()
def plain_hidden(model: PreTrainedModel, sequences: Sequence[np.ndarray]) -> torch.Tensor:
    """Return the last hidden states [M, hidden] that predict a token of ``sequences``, each computed
    alone; empty on ``meta``."""
    if model.device.type == "meta":
        return torch.empty(0, device="meta")
    rows = [torch.from_numpy(tokens)[None].to(model.device) for tokens in sequences]
    return torch.cat([backbone(model)(input_ids=row, use_cache=False)[0][0, :-1] for row in rows])


def difference(found: torch.Tensor, truth: torch.Tensor) -> str | None:
    """Describe how two tensors differ by more than rounding; None if they agree."""
    if truth.is_meta:
        return None
    if found.shape != truth.shape:
        return f"its numbers have shape {tuple(found.shape)}, expected {tuple(truth.shape)}"
    share = float((found.double() - truth.double()).norm() / truth.double().norm().clamp_min(1e-30))
    allowed = _TOLERANCE.get(truth.dtype, 1e-1)
    # written so that NaN counts as a difference
    return None if share <= allowed else f"its numbers differ from transformers' own by {share:.1e} of their length"


def unlike_attention(model: PreTrainedModel) -> str | None:
    """Describe which layers of a model are not attention; None if all are."""
    kinds = set(getattr(model.config.get_text_config(), "layer_types", None) or ()) - _ATTENTION_LAYERS
    return f"it has layers of kind {', '.join(sorted(kinds))}" if kinds else None


@torch.no_grad()
def trial(attempt: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Return the result of a trial pass. Errors of the model's own code become EngineError, except
    running out of memory and values missing on ``meta``."""
    try:
        return attempt()
    except (EngineError, torch.OutOfMemoryError, NotImplementedError):
        raise
    except Exception as error:
        if "meta" in str(error):
            raise
        raise EngineError(f"a trial pass ended by {type(error).__name__}: {error}") from error


def try_attention(
    model: PreTrainedModel, name: str, attempt: Callable[[], torch.Tensor], truth: torch.Tensor, *, passes: int = 1
) -> str:
    """Switch ``model`` to the registered attention ``name``, and compare ``attempt`` with
    ``truth``.

    ``passes`` is the number of forward passes that ``attempt`` makes. Returns why the attention is
    not usable, or an empty string if it is."""
    if unlike := unlike_attention(model):
        return unlike

    def attend() -> torch.Tensor:
        model.set_attn_implementation(name)
        if model.config._attn_implementation != name:
            raise EngineError("it does not call attention through transformers' AttentionInterface")
        return attempt()

    try:
        with _Calls(model, name, passes) as calls:
            found = trial(attend)
    except EngineError as error:
        return str(error)
    return calls.complaint() or difference(found, truth) or ""


class _Calls:
    def __init__(self, model: PreTrainedModel, name: str, passes: int) -> None:
        self._name, self._passes = name, passes
        self._text = model.config.get_text_config()
        self._attention = self._windowed = 0
        self._mixers: set[str] = set()
        self._modules = [module for module in model.modules() if isinstance(module, _MIXES)]

    def complaint(self) -> str | None:
        """Describe how the calls differ from those of plain attention; None if they do not."""
        layers = int(self._text.num_hidden_layers)
        if self._mixers:
            return f"it mixes tokens by {', '.join(sorted(self._mixers))} too"
        if self._attention != layers * self._passes:
            called = f"{self._attention / self._passes:g} call attention through transformers' AttentionInterface"
            return f"of its {layers} layers, {called}"
        wanted = self._layers_with_window(layers)
        if self._windowed < wanted * self._passes:
            return f"of its {wanted} layers with a window, {self._windowed / self._passes:g} hand it to attention"
        return None

    def _layers_with_window(self, layers: int) -> int:
        kinds = getattr(self._text, "layer_types", None)
        if kinds:
            return sum(kind == "sliding_attention" for kind in kinds)
        has_window = getattr(self._text, "sliding_window", None) and getattr(self._text, "use_sliding_window", True)
        return layers if has_window else 0

    def __enter__(self) -> Self:
        self._function = ALL_ATTENTION_FUNCTIONS[self._name]

        def count(*args: Any, **kwargs: Any) -> Any:
            self._attention += 1
            self._windowed += kwargs.get("sliding_window") is not None
            return self._function(*args, **kwargs)

        def mixed(module: torch.nn.Module, _inputs: Any) -> None:
            self._mixers.add(type(module).__name__)

        ALL_ATTENTION_FUNCTIONS.register(self._name, count)
        self._handles = [module.register_forward_pre_hook(mixed) for module in self._modules]
        return self

    def __exit__(self, *_: object) -> None:
        ALL_ATTENTION_FUNCTIONS.register(self._name, self._function)
        for handle in self._handles:
            handle.remove()
