"""From hidden states to log-probs and entropies, and to the gradient of a loss on them.

A model's head is the widest part of a step: a row of logits is as long as the vocabulary. So hidden
states are processed some rows at a time (:func:`rows_at_once`), and each part's logits are computed
once. :func:`loss_in_parts` computes log-probs, entropies, loss and the gradient of states and head
from them before the next part's logits. Only a part's gradient is kept, and nothing is recomputed
for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, cast

import numpy as np
import torch

from pipeline.process import work

HEAD_BYTES = 768 << 20
"""Memory for the logits of one part and the numbers derived from them."""
_BLOCK_BYTES = 2 << 20
"""Logits that eager computation on a CPU takes through all steps at once, in float32: what its second cache holds."""
_COPIES = 3
"""Tensors of a part's size in float32 (float64 for a float64 model): logits, their log-softmax, and
probabilities or gradient."""


class Entropy(Enum):
    """Whether and how the entropy of the next-token distribution is computed."""

    NONE = "none"
    MEASURE = "measure"
    DIFFERENTIATE = "differentiate"


def rows_at_once(vocabulary: int, dtype: torch.dtype, head_bytes: int) -> int:
    """Return how many rows of logits fit into ``head_bytes``, at least 1."""
    return max(1, head_bytes // (_COPIES * vocabulary * _score_type(dtype).itemsize))


def cut_parts(row_ids: np.ndarray, rows: int, *, keep_rows: bool) -> list[slice]:
    """Split scored tokens, whose samples are ``row_ids`` (ascending), into parts of at most
    ``rows``. With ``keep_rows`` each sample stays whole in one part, which may then be longer."""
    size = int(row_ids.size)
    if not keep_rows:
        return [slice(start, min(size, start + rows)) for start in range(0, size, rows)]
    ends = [*(np.flatnonzero(np.diff(row_ids)) + 1).tolist(), size]
    parts: list[slice] = []
    start = last = 0
    for end in ends:
        if end - start > rows and last > start:
            parts.append(slice(start, last))
            start = last
        last = end
    return [*parts, slice(start, size)]


def score_logits(
    logits: torch.Tensor,
    targets: torch.Tensor,
    temperature: float,
    entropy: Entropy,
    math: HeadMath | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return log-probs of ``targets`` [M], and their entropies in nats [M] if requested.

    ``logits`` are [M, vocabulary], before division by ``temperature``. One softmax serves both
    values, and one more both gradients."""
    logprobs, entropies = cast("Any", _Scores).apply(logits, targets, temperature, entropy, math or EAGER)
    return logprobs, entropies


def loss_in_parts(
    head: torch.nn.Module,
    states: torch.Tensor,
    parts: Sequence[slice],
    loss: Callable[[torch.Tensor, slice], torch.Tensor],
) -> torch.Tensor:
    """Return the sum over all parts of the scalar ``loss(states[part], part)``, for ``states`` [M,
    hidden].

    Each part calls ``head`` once. The gradient of states and head is computed along with the
    values, and applied in ``backward``."""
    trained = [parameter for parameter in head.parameters() if parameter.requires_grad]
    return cast("Any", _PartLosses).apply(states, parts, loss, *trained)


class _Scores(torch.autograd.Function):
    """Log-probs and entropies of logits. With probabilities p, temperature T and entropy H, ``d
    logp / dz = (onehot(target) - p) / T`` and ``d H / dz = -p (log p + H) / T``."""

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, targets: torch.Tensor, temperature: float, entropy: Entropy, math: HeadMath
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        logprobs, entropies, peaks, log_sums = math.scores(
            logits, targets, temperature, with_entropy=entropy is not Entropy.NONE
        )
        ctx.save_for_backward(logits, targets, peaks, log_sums, entropies)
        ctx.temperature, ctx.gradient = temperature, math.gradient
        ctx.set_materialize_grads(False)
        if entropies is not None and entropy is Entropy.MEASURE:
            ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, None, None, None, None]:
        logits, targets, peaks, log_sums, entropies = ctx.saved_tensors
        of_logprobs, of_entropies = grads
        if of_logprobs is None and of_entropies is None:
            return None, None, None, None, None
        if of_logprobs is None:
            of_logprobs = torch.zeros_like(log_sums)
        if of_entropies is None:
            entropies = None
        found = ctx.gradient(
            logits, targets, peaks, log_sums, of_logprobs, entropies, of_entropies, temperature=ctx.temperature
        )
        return found, None, None, None, None


def log_softmax_at(
    logits: torch.Tensor, targets: torch.Tensor, temperature: float, *, with_entropy: bool
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]:
    """Return log-probs of ``targets``, entropies if requested, and both parts of ``logsumexp(z)``,
    [M] each.

    The parts are ``max z`` and ``log sum exp(z - max z)``; their sum would round away the gradient
    of a confident policy."""
    scaled = _scaled(logits, temperature)
    everything = torch.log_softmax(scaled, dim=-1)
    logprobs = everything.gather(1, targets[:, None])[:, 0]
    likeliest, where = everything.max(dim=-1, keepdim=True)
    peaks, log_sums = scaled.gather(1, where)[:, 0], -likeliest[:, 0]
    del scaled
    if not with_entropy:
        return logprobs, None, peaks, log_sums
    return logprobs, -(everything.exp() * everything).sum(dim=-1), peaks, log_sums


def logits_gradient(
    logits: torch.Tensor,
    targets: torch.Tensor,
    peaks: torch.Tensor,
    log_sums: torch.Tensor,
    of_logprobs: torch.Tensor,
    entropies: torch.Tensor | None,
    of_entropies: torch.Tensor | None,
    *,
    temperature: float,
) -> torch.Tensor:
    """Return the gradient of logits, in their type, from those of log-probs and entropies."""
    logs = (_scaled(logits, temperature) - peaks[:, None]).sub_(log_sums[:, None])
    factors = -of_logprobs[:, None]
    if entropies is not None and of_entropies is not None:
        found = logs.exp().mul_(factors - of_entropies[:, None] * (logs + entropies[:, None]))
    else:
        found = logs.exp_().mul_(factors)
    found.scatter_add_(1, targets[:, None], of_logprobs[:, None].to(found.dtype))
    return (found if temperature == 1.0 else found.div_(temperature)).to(logits.dtype)


def _blocks(logits: torch.Tensor) -> list[slice]:
    """Return the rows that a CPU's cache holds at once, block by block; elsewhere all rows are one block."""
    size = max(1, logits.shape[0])
    rows = size
    if logits.device.type == "cpu":
        rows = max(1, _BLOCK_BYTES // (logits.shape[1] * _score_type(logits.dtype).itemsize))
    return [slice(start, start + rows) for start in range(0, size, rows)]


def _scores_in_blocks(logits: torch.Tensor, targets: torch.Tensor, temperature: float, *, with_entropy: bool) -> Any:
    found = [
        log_softmax_at(logits[block], targets[block], temperature, with_entropy=with_entropy)
        for block in _blocks(logits)
    ]
    return tuple(None if column[0] is None else torch.cat(column) for column in zip(*found, strict=True))


def _gradient_in_blocks(logits: torch.Tensor, *columns: torch.Tensor | None, temperature: float) -> torch.Tensor:
    blocks = _blocks(logits)
    if len(blocks) == 1:
        whole: Any = columns
        return logits_gradient(logits, *whole, temperature=temperature)
    found = torch.empty_like(logits)
    for block in blocks:
        of_block: Any = (None if column is None else column[block] for column in columns)
        found[block] = logits_gradient(logits[block], *of_block, temperature=temperature)
    return found


@dataclass(frozen=True, slots=True)
class HeadMath:
    """The computation on logits, as written here or compiled."""

    scores: Callable[..., Any] = log_softmax_at
    gradient: Callable[..., Any] = logits_gradient


EAGER = HeadMath(_scores_in_blocks, _gradient_in_blocks)
_MATH = "headrace_head_math"


def set_head_math(model: torch.nn.Module, math: HeadMath) -> None:
    setattr(model, _MATH, math)


def head_math(model: torch.nn.Module) -> HeadMath:
    """Return how a model's logits are computed with; eagerly if nothing else was set."""
    return getattr(model, _MATH, EAGER)


def _score_type(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _scaled(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    logits = logits.to(_score_type(logits.dtype))
    return logits if temperature == 1.0 else logits / temperature


class _PartLosses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        states: torch.Tensor,
        parts: Sequence[slice],
        loss: Callable[[torch.Tensor, slice], torch.Tensor],
        *trained: torch.Tensor,
    ) -> torch.Tensor:
        found = torch.empty_like(states) if ctx.needs_input_grad[0] else None
        of_trained: list[torch.Tensor] = []
        total: torch.Tensor | None = None
        for part in parts:
            piece = states[part].detach()
            with torch.enable_grad():
                value = loss(piece.requires_grad_(), part)
                inputs = [*([piece] if found is not None else []), *trained]
                if value.requires_grad and inputs:
                    grads = list(torch.autograd.grad(value, inputs, materialize_grads=True))
                else:
                    grads = [torch.zeros_like(one) for one in inputs]
            if found is not None:
                found[part] = grads.pop(0)
            if of_trained:
                for one, other in zip(of_trained, grads, strict=True):
                    one.add_(other)
            else:
                of_trained = grads
            del grads
            total = value.detach() if total is None else total + value.detach()
            work.step()
        assert total is not None, "a micro-batch has a scored token"
        ctx.has_states = found is not None
        ctx.save_for_backward(*([found] if found is not None else []), *of_trained)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (factor,) = grads
        # in place: the head's gradient is as large as the head. Through ``data``, since a pipeline that splits its backward
        # pass comes here twice, with a factor of 1
        saved = [tensor.data.mul_(factor.to(tensor.dtype)) for tensor in ctx.saved_tensors]
        return (saved.pop(0) if ctx.has_states else None, None, None, *saved)
