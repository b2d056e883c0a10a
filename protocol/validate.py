"""Rules about the fields of a message, beyond their types.

The checks read sizes and dtypes but never all elements; they take a third of a microsecond."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import numpy as np

from protocol.arrays import FLOAT32, INT32, UINT8
from protocol.errors import MalformedMessage
from protocol.limits import MAX_DEPTH
from protocol.messages import BASE_VERSION, FilePart, FileRequest, Message, WeightsPart, WeightsRequest
from protocol.trajectory import GuidanceScore, ReferenceScore, Score, TrajectoryChunk, Turn, ValueScore


def check_vectors(obj: Message | Score) -> None:
    """Raise MalformedMessage when an array of ``obj`` has a wrong dtype or is not a vector.

    For messages to send, since the decoder only makes such vectors."""
    if isinstance(obj, TrajectoryChunk):
        prompt, context, tokens, logprobs = obj.prompt.tokens, obj.context_tokens, obj.tokens, obj.behavior_logprobs
        if (
            prompt.dtype is context.dtype is tokens.dtype is INT32
            and logprobs.dtype is FLOAT32
            and prompt.ndim == context.ndim == tokens.ndim == logprobs.ndim == 1
        ):
            return
        _check_vector("prompt.tokens", prompt, INT32)
        _check_vector("context_tokens", context, INT32)
        _check_vector("tokens", tokens, INT32)
        _check_vector("behavior_logprobs", logprobs, FLOAT32)
    elif isinstance(obj, ReferenceScore):
        _check_vector("logprobs", obj.logprobs, FLOAT32)
    elif isinstance(obj, ValueScore):
        _check_vector("values", obj.values, FLOAT32)
    elif isinstance(obj, GuidanceScore):
        _check_vector("standard_logprobs", obj.standard_logprobs, FLOAT32)
        _check_vector("judge_logprobs", obj.judge_logprobs, FLOAT32)
    elif isinstance(obj, Turn):
        _check_vector("tokens", obj.tokens, INT32)
    elif isinstance(obj, WeightsPart | FilePart):
        _check_vector("data", obj.data, UINT8)


def check_consistency(obj: Message | Score) -> None:
    """Raise MalformedMessage when the fields of ``obj`` contradict each other."""
    if isinstance(obj, TrajectoryChunk):
        _check_chunk(obj)
    elif isinstance(obj, WeightsRequest):
        if obj.version < BASE_VERSION or obj.offset < 0 or obj.max_bytes <= 0:
            raise MalformedMessage(
                f"weights request for version {obj.version}, offset {obj.offset}, max_bytes {obj.max_bytes}; "
                f"expected {BASE_VERSION} or more, 0 or more, and above 0"
            )
    elif isinstance(obj, FileRequest):
        if obj.offset < 0 or obj.max_bytes <= 0:
            raise MalformedMessage(
                f"file request with offset {obj.offset}, max_bytes {obj.max_bytes}; expected 0 or more, and above 0"
            )
    elif isinstance(obj, WeightsPart) and obj.data.size and obj.apart not in (0, obj.data.size):
        raise MalformedMessage(
            f"weights part of {obj.data.size} bytes, of which {obj.apart} are in a separate frame; expected all"
        )
    elif isinstance(obj, WeightsPart | FilePart) and not 0 <= obj.offset <= obj.total_bytes - obj.data.size:
        what = "weights" if isinstance(obj, WeightsPart) else "file"
        raise MalformedMessage(
            f"{what} part of {obj.data.size} bytes at offset {obj.offset} is not within a file of {obj.total_bytes} bytes"
        )
    elif isinstance(obj, Turn):
        if not obj.is_done and not obj.tokens.size:
            raise MalformedMessage("a turn without tokens that does not end the trajectory; expected at least one")
    elif isinstance(obj, GuidanceScore):
        sizes = {found.size for found in (obj.standard_logprobs, obj.judge_logprobs) if found.size}
        if len(sizes) > 1:
            raise MalformedMessage(
                f"guidance of {obj.standard_logprobs.size} standard and {obj.judge_logprobs.size} judge log-probs; "
                f"expected equal numbers, or none of one"
            )


def _check_vector(name: str, array: np.ndarray, dtype: np.dtype[Any]) -> None:
    if array.dtype != dtype:
        raise MalformedMessage(f"{name} has dtype {array.dtype.str}, expected {dtype.str}; convert it with astype")
    if array.ndim != 1:
        raise MalformedMessage(f"{name} has {array.ndim} dimensions, expected 1")


def _check_chunk(chunk: TrajectoryChunk) -> None:
    num_tokens = len(chunk.tokens)
    num_logprobs = len(chunk.behavior_logprobs)
    if num_logprobs != num_tokens:
        raise MalformedMessage(
            f"behavior_logprobs has {num_logprobs} values for {num_tokens} tokens; expected one per token"
        )
    total = 0
    for segment in chunk.segments:
        length = segment.num_tokens
        if length <= 0 and not chunk.is_opening:
            raise MalformedMessage(f"a segment of {length} tokens; expected at least one")
        total += length
    if total != num_tokens:
        raise MalformedMessage(f"segments sum to {total} tokens, but the chunk has {num_tokens}")
    if chunk.is_opening and (chunk.id.index or len(chunk.segments) != 1):
        raise MalformedMessage(
            f"chunk {str(chunk.id)[:60]!r} has no tokens and {len(chunk.segments)} segments; expected chunk 0 with one, "
            "which names the version that is to sample it"
        )
    end = 0
    for span in chunk.given_spans:
        if span.start < end or span.num_tokens <= 0:
            raise MalformedMessage(
                f"the environment's tokens at {span.start}, {span.num_tokens} of them, come after {end}; expected spans "
                "in order, apart and not empty"
            )
        end = span.start + span.num_tokens
    if end > len(chunk.context_tokens):
        raise MalformedMessage(f"the environment's tokens end at {end}, after {len(chunk.context_tokens)} of context")
    if not chunk.id.is_well_formed:
        raise MalformedMessage(
            f"chunk id {str(chunk.id)[:60]!r} is not one that a ledger makes; expected one such as t.12.3.0"
        )
    extra = chunk.prompt.extra
    if extra:
        _check_plain("prompt.extra", extra)


def _check_plain(name: str, value: dict[str, Any]) -> None:
    """Refuse nesting over MAX_DEPTH, and arrays, in the only field without a declared type."""
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        # by identity, so that a container referenced twice does not double at each level
        inner: dict[int, Any] = {}
        for container in level:
            items = cast("dict[Any, Any]", container).values() if isinstance(container, dict) else container
            for item in cast("Iterable[Any]", items):
                if isinstance(item, dict | list | tuple):
                    if item:
                        inner[id(cast("object", item))] = item
                elif isinstance(item, np.ndarray):
                    raise MalformedMessage(f"{name} contains an array, which cannot be encoded there; use a list")
        if not inner:
            return
        level = list(inner.values())
    raise MalformedMessage(f"{name} is nested more than {MAX_DEPTH} levels deep; flatten it")
