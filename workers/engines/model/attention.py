"""Attention over packed sequences: many sequences in one row of tokens, none of which sees another.

Queries, keys and values are a row ``[1, heads, N, head dim]``; a :class:`PackedLayout` says where
each sequence is. Sequences with a common prefix share its tokens in the row.

The function is registered with transformers under :data:`PACKED_ATTENTION`, and a model with this
attention calls it in every layer. No mask is registered under the name, so transformers makes none:
the layout alone decides which tokens see each other. On CUDA in half precision the row goes to a
variable-length kernel as it is. Elsewhere sequences of similar length are padded into small
buckets, inside attention only; all other layers work on the N tokens. Queries of a shared prefix
are in one bucket, its keys and values in the bucket of each sequence that has it.

Soft caps and attention sinks are computed in the buckets. A sink is one more key, whose score is a
parameter of the head and whose value is 0 (gpt-oss)."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, cast

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from protocol.errors import EngineError

PACKED_ATTENTION = "headrace_packed"
"""Name under which :func:`packed_attention` is registered with transformers."""

BUCKET_FILL = 0.75
"""A sequence shorter than this share of a bucket's longest starts the next bucket."""

BUCKET_SLACK = 16
"""A sequence at most this many tokens shorter than the longest stays in its bucket anyway."""

LITTLE_SHARED = 0.125
"""A sequence that shares no more than this attends whole, which needs no mask."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Sequences of similar length that are padded to the longest and attend in one call.

    Only the last tokens of a sequence have queries if another one has those of its first tokens."""

    gather: torch.Tensor
    """int64 [num_sequences * length]: index into the row of each padded token; padding repeats the
    last token."""
    num_sequences: int
    length: int
    queries: torch.Tensor
    """int64 [num_sequences * num_queries]: index into the row of each query; padded like tokens."""
    num_queries: int
    places: torch.Tensor | None
    """int64 [1 or num_sequences, num_queries]: place of each query in its sequence; None if every
    token has one."""
    start: int | None = None
    """Index of the first token if sequences are whole and lie end to end without padding: nothing is gathered."""
    masks: dict[tuple[int | None, torch.dtype], torch.Tensor] = field(default_factory=dict)

    def mask(self, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        """Return [1 or num_sequences, 1, num_queries, length], to be added to scores."""
        if (window, dtype) not in self.masks:
            keys = torch.arange(self.length, device=self.gather.device)
            distance = (keys[None] if self.places is None else self.places)[..., None] - keys
            hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
            mask = torch.zeros(hidden.shape, dtype=dtype, device=keys.device).masked_fill_(hidden, -torch.inf)
            self.masks[window, dtype] = mask[:, None]
        return self.masks[window, dtype]


@dataclass(frozen=True, slots=True)
class PackedLayout:
    """Where the sequences of a packed row are.

    Example: lengths (3, 2) give position_ids [0, 1, 2, 0, 1] and cumulative_lengths [0, 3, 5]. If
    the second begins like the first, shared (0, 1) leaves out its first token: position_ids are [0,
    1, 2, 1]."""

    position_ids: torch.Tensor
    """int64 [N]: position of each token in its own sequence."""
    cumulative_lengths: torch.Tensor | None
    """int32 [num_sequences + 1], from 0 to N; None when sequences share tokens."""
    max_length: int
    buckets: tuple[Bucket, ...]
    scatter: torch.Tensor
    """int64 [N]: index of each token in the concatenated queries of all buckets."""

    @classmethod
    def of(
        cls, lengths: Sequence[int] | np.ndarray, device: torch.device, shared: Sequence[int] | np.ndarray | None = None
    ) -> PackedLayout:
        """Lay sequences end to end.

        The first ``shared[i]`` tokens of sequence i are those of sequence i - 1 and are not
        repeated; by default none are shared. Raises ValueError for an empty list, an empty
        sequence, or more shared tokens than either sequence has."""
        sizes = np.asarray(lengths, dtype=np.int64)
        if sizes.size == 0 or sizes.min() < 1:
            raise ValueError(f"a packed row of sequence lengths {sizes.tolist()}; each must be at least 1")
        common = np.zeros_like(sizes) if shared is None else np.asarray(shared, dtype=np.int64)
        most = np.minimum(sizes, np.concatenate([[0], sizes[:-1]]))
        if common.shape != sizes.shape or (common < 0).any() or (common > most).any():
            raise ValueError(
                f"sequences of lengths {sizes.tolist()} cannot share {common.tolist()} tokens, each with the one before; "
                "expected at most the shorter length"
            )
        num_tokens = int((sizes - common).sum())
        buckets, scatter = _make_buckets(lay(sizes, common), common, num_tokens, device)
        positions = np.concatenate([np.arange(alike, size) for alike, size in zip(common, sizes, strict=True)])
        cumulative = None if common.any() else np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
        return cls(
            position_ids=torch.from_numpy(positions).to(device),
            cumulative_lengths=None if cumulative is None else torch.from_numpy(cumulative).to(device),
            max_length=int(sizes.max()),
            buckets=buckets,
            scatter=torch.from_numpy(scatter).to(device),
        )

    @property
    def num_tokens(self) -> int:
        return int(self.position_ids.numel())


def lay(sizes: np.ndarray, shared: np.ndarray) -> list[np.ndarray]:
    """Return int64 indices into the row for the tokens of each sequence.

    The first ``shared[i]`` are indices of sequence i - 1; the others are new."""
    places: list[np.ndarray] = []
    for size, alike, end in zip(sizes, shared, np.cumsum(sizes - shared), strict=True):
        before = places[-1][:alike] if alike else np.empty(0, np.int64)
        places.append(np.concatenate([before, np.arange(end - size + alike, end)]))
    return places


def _make_buckets(
    places: list[np.ndarray], shared: np.ndarray, num_tokens: int, device: torch.device
) -> tuple[tuple[Bucket, ...], np.ndarray]:
    """Return the buckets for sequences at these ``places`` of a row, and the layout's scatter."""
    paths, begins = _paths(places, shared)
    sizes = np.array([path.size for path in paths])
    starts = np.where(begins <= LITTLE_SHARED * sizes, 0, begins)
    scatter = np.empty(num_tokens, np.int64)
    buckets: list[Bucket] = []
    offset = 0
    for members in _group(sizes, starts):
        length, num_queries = int(sizes[members].max()), int((sizes - starts)[members].max())
        gather = np.stack([_padded(paths[member], length) for member in members])
        queries = np.stack([_padded(paths[member][starts[member] :], num_queries) for member in members])
        for row, member in zip(queries, members, strict=True):
            size = int(sizes[member] - starts[member])
            scatter[row[:size]] = np.arange(offset, offset + size)
            offset += num_queries
        where = None
        if (begun := starts[members]).any():
            alike = begun[:1] if (begun == begun[0]).all() else begun
            # padding stays within the sequence: a query that sees no key would have no number
            where = np.minimum(alike[:, None] + np.arange(num_queries), length - 1)
        buckets.append(
            Bucket(
                torch.from_numpy(gather.ravel()).to(device),
                len(members),
                length,
                torch.from_numpy(queries.ravel()).to(device),
                num_queries,
                None if where is None else torch.from_numpy(where).to(device),
                int(gather[0, 0]) if where is None and (np.diff(gather.ravel()) == 1).all() else None,
            )
        )
    return tuple(buckets), scatter


def _paths(places: list[np.ndarray], shared: np.ndarray) -> tuple[list[np.ndarray], np.ndarray]:
    """Return the places of sequences, without those that are the beginning of another, and where in
    each the tokens begin that none before it has."""
    paths: list[np.ndarray] = []
    begins: list[int] = []
    common = 0
    for place, alike in zip(places, shared.tolist(), strict=True):
        common = min(common, alike)
        if alike == place.size:
            continue
        if paths and common == paths[-1].size:
            paths[-1] = place
        else:
            paths.append(place)
            begins.append(alike)
        common = place.size
    return paths, np.array(begins)


def _padded(values: np.ndarray, size: int) -> np.ndarray:
    return np.concatenate([values, np.full(size - values.size, values[-1])])


def packed_attention(
    module: torch.nn.Module | None,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    packed_layout: PackedLayout | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attend causally within each sequence of a packed row; a transformers attention function.

    Query is [1, query heads, N, head dim]; key and value have key heads, which divide query heads.
    ``scaling`` defaults to head dim ** -0.5. Dropout is ignored: a policy's log-probs must not
    depend on chance. With ``sliding_window`` a token sees that many tokens, itself included.
    ``softcap`` c makes scores ``c tanh(s / c)``. ``s_aux`` holds the sinks' scores, [query heads].

    Returns [1, N, query heads, head dim], and None in place of attention weights. Raises
    EngineError without a layout, with a mask, or for sinks together with a soft cap."""
    if packed_layout is None or attention_mask is not None:
        raise EngineError(
            f"attention {PACKED_ATTENTION} was called "
            f"{'without packed_layout' if packed_layout is None else 'with a mask'}; "
            "run the model through workers.engines.model.packed, or load it with another attn_implementation"
        )
    if query.device.type != "meta" and torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    elif key.dtype != value.dtype or query.dtype != value.dtype:
        query, key = query.to(value.dtype), key.to(value.dtype)
    window = sliding_window if sliding_window is not None and sliding_window < packed_layout.max_length else None
    # [N, heads, head dim]: one row of memory per token, so that gathering a token copies one piece
    query, key, value = (tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value))
    in_half = query.is_cuda and query.dtype in (torch.bfloat16, torch.float16)
    if in_half and softcap is None and s_aux is None and _varlen_kernel() is not None:
        output = _attend_varlen(query, key, value, packed_layout, scaling, window)
    else:
        output = _attend_buckets(query, key, value, packed_layout, scaling, window, softcap, s_aux)
    return output.unsqueeze(0), None


def _attend_buckets(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layout: PackedLayout,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    outputs: list[torch.Tensor] = []
    is_plain = softcap is None and sinks is None
    for bucket in layout.buckets:
        q, k, v = (
            _picked(tensor, bucket.start, places).unflatten(0, (bucket.num_sequences, -1)).transpose(1, 2)
            for tensor, places in ((query, bucket.queries), (key, bucket.gather), (value, bucket.gather))
        )
        # Padding is on the right, so a causal mask is enough to hide it from every real token.
        is_causal = window is None and bucket.places is None
        if is_plain and _differentiates_slowly(q, k, v):
            masks = (None, None) if is_causal else (bucket.mask(window, q.dtype), bucket.mask(window, torch.float32))
            attended = cast("Any", _HalfAttention).apply(q, k, v, *masks, scaling)
        elif is_plain and is_causal:
            attended = scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=scaling, enable_gqa=q.shape[1] != k.shape[1]
            )
        else:
            attended = attend(q, k, v, bucket.mask(window, q.dtype), scaling, softcap, sinks)
        outputs.append(attended.transpose(1, 2).flatten(0, 1))
    if len(outputs) == 1 and layout.buckets[0].start is not None:
        return outputs[0]
    return torch.cat(outputs).index_select(0, layout.scatter)


def _picked(tensor: torch.Tensor, start: int | None, places: torch.Tensor) -> torch.Tensor:
    return tensor.index_select(0, places) if start is None else tensor.narrow(0, start, places.shape[0])


def _differentiates_slowly(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    return (
        query.device.type == "cpu"
        and query.dtype in (torch.bfloat16, torch.float16)
        and query.shape[-1] == value.shape[-1]
        and torch.is_grad_enabled()
        and (query.requires_grad or key.requires_grad or value.requires_grad)
    )


class _HalfAttention(torch.autograd.Function):
    """Attention on a CPU in half precision, differentiated in float32.

    The forward kernel is the one that torch chooses. Its gradient's kernel takes up to 6 times as long in half
    precision as in float32, most for short sequences."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        mask_of_gradient: torch.Tensor | None,
        scaling: float | None,
    ) -> torch.Tensor:
        """Without a mask attention is causal."""
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        output, log_sums = kernel(query, key, value, 0.0, mask is None, attn_mask=mask, scale=scaling)
        ctx.save_for_backward(query, key, value, output, log_sums)
        ctx.mask, ctx.scaling = mask_of_gradient, scaling
        return output

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, output, log_sums = ctx.saved_tensors
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        singles = (tensor.float() for tensor in (grads[0], query, key, value, output))
        found = kernel(*singles, log_sums, 0.0, ctx.mask is None, attn_mask=ctx.mask, scale=ctx.scaling)
        return *(one.to(query.dtype) for one in found), None, None, None


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attend with a mask, and optionally soft-capped scores or sinks; returns what SDPA returns.

    Query is [n, query heads, T, head dim]; key and value [n, key heads, S, head dim]. ``mask`` is
    bool, True where a key is seen, or added to the scores; it broadcasts to [n, query heads, T, S].
    ``sinks`` are [query heads]. Raises EngineError for sinks together with a soft cap."""
    if sinks is not None and softcap is not None:
        raise EngineError("attention with both sinks and a soft cap is not supported")
    grouped = query.shape[1] != key.shape[1]
    if softcap is not None:
        if grouped:
            repeats = query.shape[1] // key.shape[1]
            key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
        scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
        scores = softcap * torch.tanh(scores / softcap)
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
        weights = torch.softmax(scores, -1, dtype=torch.float64 if scores.dtype == torch.float64 else torch.float32)
        return weights.to(value.dtype) @ value
    if sinks is not None:
        query, key, value, mask, scaling = _with_sinks(query, key, value, mask, scaling, sinks)
    attended = scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling, enable_gqa=grouped)
    return attended if sinks is None else attended[..., :-_SINK_WIDTH]


_SINK_WIDTH = 8
"""Columns that sinks add to a head; only the first is used, but kernels want multiples of 8."""


def _with_sinks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float | None,
    sinks: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, float]:
    """Append a key that every query sees and whose value is 0.

    One more column of the queries makes its score; that column is 0 in all other keys."""
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    query, key, value = (torch.nn.functional.pad(tensor, (0, _SINK_WIDTH)) for tensor in (query, key, value))
    score = (sinks.to(query.dtype) / scale).view(1, -1, 1).expand(query.shape[:-1])
    query = torch.cat([query[..., :-_SINK_WIDTH], score[..., None], query[..., 1 - _SINK_WIDTH :]], -1)
    sink = torch.zeros_like(key[:, :, :1])
    sink[..., -_SINK_WIDTH] = 1.0
    if mask is not None:
        mask = torch.nn.functional.pad(mask, (0, 1), value=True if mask.dtype == torch.bool else 0.0)
    return query, torch.cat([key, sink], 2), torch.cat([value, torch.zeros_like(value[:, :, :1])], 2), mask, scale


def _attend_varlen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layout: PackedLayout,
    scaling: float | None,
    window: int | None,
) -> torch.Tensor:
    kernel = _varlen_kernel()
    assert kernel is not None, "the caller checks that there is a kernel"
    lengths, longest = layout.cumulative_lengths, layout.max_length
    assert lengths is not None, "sequences share no tokens on CUDA (packed.py)"
    if query.shape[1] != key.shape[1]:
        repeats = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
    return kernel(
        query.contiguous(),
        key.contiguous(),
        value.contiguous(),
        lengths,
        lengths,
        longest,
        longest,
        scale=scaling,
        window_size=(-1 if window is None else window - 1, 0),
    )


@cache
def _varlen_kernel() -> Any | None:
    """Return torch's variable-length attention, or None if it lacks the options we need."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn if {"scale", "window_size"} <= inspect.signature(varlen_attn).parameters.keys() else None


def _group(sizes: np.ndarray, starts: np.ndarray) -> list[np.ndarray]:
    """Group sequences that attend in one call: whole ones apart from others, with padding of both
    keys and queries bounded."""
    groups: list[np.ndarray] = []
    for kind in (np.flatnonzero(starts == 0), np.flatnonzero(starts)):
        for alike in _group_by_length(sizes[kind]):
            members = kind[alike]
            groups += [members[part] for part in _group_by_length((sizes - starts)[members])]
    return groups


def _group_by_length(sizes: np.ndarray) -> list[list[int]]:
    # longest first: a group begins with its longest sequence
    groups: list[list[int]] = []
    shortest = 0.0
    for member in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[member])
        if not groups or size < shortest:
            groups.append([])
            shortest = min(BUCKET_FILL * size, size - BUCKET_SLACK)
        groups[-1].append(member)
    return groups


AttentionInterface.register(PACKED_ATTENTION, packed_attention)
