"""What must hold between the fields of a message, beyond their types.

*Consumes* a decoded message, or one about to be sent. *Produces* nothing, or the MalformedMessage that names the field.
*Waits for* nothing.

The checks look at sizes and dtypes only, never at every element: they cost well under a microsecond.
"""

from __future__ import annotations

import numpy as np

from protocol.errors import MalformedMessage
from protocol.messages import Message, WeightsPart, WeightsRequest
from protocol.trajectory import ReferenceScore, Score, TrajectoryChunk, ValueScore

_INT32 = np.dtype("<i4")
_FLOAT32 = np.dtype("<f4")
_UINT8 = np.dtype("|u1")


def check_consistency(obj: Message | Score) -> None:
    """Raise MalformedMessage when the fields of ``obj`` contradict one another."""
    if isinstance(obj, TrajectoryChunk):
        _check_chunk(obj)
    elif isinstance(obj, ReferenceScore):
        _check_vector("logprobs", obj.logprobs, _FLOAT32)
    elif isinstance(obj, ValueScore):
        _check_vector("values", obj.values, _FLOAT32)
    elif isinstance(obj, WeightsRequest):
        if obj.version < 0 or obj.offset < 0 or obj.max_bytes <= 0:
            raise MalformedMessage(
                f"weights request for version {obj.version}, offset {obj.offset}, max_bytes {obj.max_bytes}; "
                "expected 0 or more, 0 or more, and above 0"
            )
    elif isinstance(obj, WeightsPart):
        _check_vector("data", obj.data, _UINT8)
        if obj.offset < 0 or obj.offset + obj.data.size > obj.total_bytes:
            raise MalformedMessage(
                f"weights part of {obj.data.size} bytes at offset {obj.offset} is not within a file of {obj.total_bytes} bytes"
            )


def _check_vector(name: str, array: np.ndarray, dtype: np.dtype[np.generic]) -> None:
    if array.dtype is not dtype and array.dtype.newbyteorder("<") != dtype:  # the codec turns bytes, no more
        raise MalformedMessage(f"{name} has dtype {array.dtype}, expected {dtype}")
    if array.ndim != 1:
        raise MalformedMessage(f"{name} has {array.ndim} dimensions, expected 1")


def _check_chunk(chunk: TrajectoryChunk) -> None:
    tokens = chunk.tokens
    logprobs = chunk.behavior_logprobs
    _check_vector("prompt.tokens", chunk.prompt.tokens, _INT32)
    _check_vector("context_tokens", chunk.context_tokens, _INT32)
    _check_vector("tokens", tokens, _INT32)
    _check_vector("behavior_logprobs", logprobs, _FLOAT32)
    num_tokens = tokens.size
    if logprobs.size != num_tokens:
        raise MalformedMessage(
            f"behavior_logprobs has {logprobs.size} values for {num_tokens} tokens; expected one a token"
        )
    total = 0
    for segment in chunk.segments:
        length = segment.num_tokens
        if length <= 0:
            raise MalformedMessage(f"a segment of {length} tokens; a segment holds at least one")
        total += length
    if total != num_tokens:
        raise MalformedMessage(f"segments sum to {total} tokens, but the chunk has {num_tokens}")
    trajectory = chunk.id.trajectory
    if chunk.id.index < 0 or trajectory.group < 0 or trajectory.member < 0:
        raise MalformedMessage(f"chunk id {chunk.id} has a negative part")
