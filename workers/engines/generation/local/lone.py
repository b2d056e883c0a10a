"""Runs a language model one row at a time, each with the model's own cache.

For models that the slot cache cannot serve: recurrent layers, convolutions, attention that adds
positions to its scores. A decode step is one pass per row, so its time grows with the number of
rows."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from pipeline.process import work
from protocol.errors import EngineError
from workers.engines.generation.local.dense import replace_weights, unserved_weights
from workers.engines.model.trial import attend_eagerly

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_NAMES = ("past_key_values", "cache_params", "state")
"""Names under which models take and return their cache."""


class LoneRows:
    def __init__(self) -> None:
        self.max_length = 0
        self.kept: list[Any] = []

    def reserve(self, num_rows: int, length: int) -> None:
        del length
        self.kept += [None] * (num_rows - len(self.kept))

    def move(self, targets: list[int], sources: list[int], length: int) -> None:
        del length
        self.reserve(max([*targets, *sources], default=-1) + 1, 0)
        held = [self.kept[row] for row in sources]
        for row in set(sources) - set(targets):
            self.kept[row] = None
        for row, cache in zip(targets, held, strict=True):
            self.kept[row] = cache

    def release(self) -> None:
        self.kept.clear()

    @property
    def num_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in _tensors(self.kept, set()))


class LoneForward:
    """Computes rows one after another; otherwise like ``SlotForward``."""

    def __init__(self, model: PreTrainedModel) -> None:
        attend_eagerly(model)
        self.model = model.eval()
        self.config = model.config.get_text_config()
        self.cache = LoneRows()
        self.prompts = None

    def load_weights(self, tensors: Mapping[str, torch.Tensor]) -> None:
        replace_weights(self.model, tensors)

    def unserved(self, tensors: Mapping[str, torch.Tensor]) -> list[str]:
        return unserved_weights(self.model, tensors)

    @property
    def cache_bytes(self) -> int:
        return self.cache.num_bytes

    def share(self, prompts: Sequence[object]) -> None:
        """Does nothing: rows share no prompts."""

    def prefill(self, contexts: Sequence[np.ndarray], rows: Sequence[int], prompts: Sequence[object] = ()) -> int:
        del prompts
        self.cache.reserve(max(rows) + 1, 0)
        wanted: dict[bytes, tuple[np.ndarray, list[int]]] = {}
        for context, row in zip(contexts, rows, strict=True):
            wanted.setdefault(context[:-1].tobytes(), (context[:-1], []))[1].append(row)
        total = sum(head.size for head, _ in wanted.values())
        with work.task("prefill", float(total), "tokens"):
            for head, sharing in wanted.values():
                kept = None
                if head.size:
                    with work.part(head.size / total):
                        _, kept = self._pass(head.astype(np.int64), None)
                for number, row in enumerate(sharing):
                    self.cache.kept[row] = copy.deepcopy(kept) if number else kept
        return total

    def decode(self, tokens: np.ndarray, positions: np.ndarray, shared: object = None) -> torch.Tensor:
        del positions, shared
        self.cache.reserve(tokens.size, 0)
        logits: list[torch.Tensor] = []
        for row in range(tokens.size):
            made, self.cache.kept[row] = self._pass(tokens[row : row + 1], self.cache.kept[row])
            logits.append(made)
        return torch.stack(logits)

    def _pass(self, tokens: np.ndarray, kept: Any) -> tuple[torch.Tensor, Any]:
        """Return the last token's logits [vocabulary], and the cache."""
        row = torch.from_numpy(tokens)[None].to(self.model.device)
        given = {} if kept is None else {self._name: kept}
        output = self.model(input_ids=row, use_cache=True, **given)
        if kept is None:
            self._name = _name_of(self.model, output)
        return output.logits[0, -1], getattr(output, self._name)


def _name_of(model: PreTrainedModel, output: Any) -> str:
    for name in _NAMES:
        if getattr(output, name, None) is not None:
            return name
    raise EngineError(
        f"{type(model).__name__} returns none of {', '.join(_NAMES)}, so its context cannot be cached; choose "
        f"another model"
    )


def _tensors(value: Any, seen: set[int]) -> list[torch.Tensor]:
    """Return the tensors in a cache, at any depth, once each."""
    if id(value) in seen:
        return []
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        parts = list(cast("dict[Any, Any]", value).values())
    elif isinstance(value, list | tuple):
        parts = list(cast("list[Any]", value))
    elif type(value).__module__.startswith("transformers."):
        parts = list(vars(value).values())
    else:
        return []
    return [tensor for part in parts for tensor in _tensors(part, seen)]
