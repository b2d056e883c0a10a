"""Decodes stored bytes for both ledgers and the update log.

A chunk is encoded once, by the generator (``protocol.codec.encode_once``); links and the ledger share that
encoding, and the ledger stores it as a blob. Nothing here encodes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec

from pipeline.ledger.types import FinishedTrajectory, ScoredChunk, ShownResponse
from protocol.codec import from_blob
from protocol.trajectory import (
    Field,
    GuidanceScore,
    ReferenceScore,
    RewardScore,
    Score,
    TrajectoryChunk,
    Turn,
    ValueScore,
)

SCORE_TYPES: Final[Mapping[Field, type[Score]]] = {
    Field.REWARD: RewardScore,
    Field.REFERENCE: ReferenceScore,
    Field.VALUE: ValueScore,
    Field.GUIDANCE: GuidanceScore,
    Field.TURN: Turn,
}
FIELDS: Final = tuple(Field)


def read_chunk(blob: bytes) -> TrajectoryChunk:
    """Decode a stored chunk. Raises WireError, like all functions here."""
    return from_blob(blob, TrajectoryChunk)


def read_turn(blob: bytes) -> Turn:
    return from_blob(blob, Turn)


def read_scores(blobs: Mapping[Field, bytes | None]) -> dict[Field, Score]:
    """Decode a chunk's stored scores, in the order of ``FIELDS``. A None value is an absent score."""
    return {field: from_blob(blob, SCORE_TYPES[field]) for field in FIELDS if (blob := blobs.get(field)) is not None}


def read_scored(blob: bytes, scores: Mapping[Field, bytes | None]) -> ScoredChunk:
    return ScoredChunk(read_chunk(blob), read_scores(scores))


BESIDE: Final[Mapping[Field, Field]] = {Field.GUIDANCE: Field.REWARD, Field.REWARD: Field.TURN}
"""The score with which a chunk that lacks a field is handed out, if it has that score."""


def read_overdue(blobs: Sequence[Any], beside: Field | None) -> list[ScoredChunk]:
    """Decode chunks that were handed out. With ``beside``, each blob is followed by that score's, or None."""
    if beside is None:
        return [read_scored(blob, {}) for blob in blobs]
    return [read_scored(blob, {beside: score}) for blob, score in zip(blobs[::2], blobs[1::2], strict=True)]


def with_turn(scored: ScoredChunk) -> TrajectoryChunk:
    """Return a final chunk as the environment hands it on: with its last turn, if it has one."""
    turn = scored.scores.get(Field.TURN)
    return msgspec.structs.replace(scored.chunk, turn=turn) if isinstance(turn, Turn) else scored.chunk


def read_shown(kind: str, blob: bytes, reward: bytes) -> ShownResponse:
    return ShownResponse(kind, read_chunk(blob), from_blob(reward, RewardScore))


def read_finished(final: bytes, reward: bytes, values: Iterable[bytes]) -> FinishedTrajectory:
    """Decode a trajectory that is kept for the value worker; ``values`` are by chunk."""
    read = tuple(from_blob(value, ValueScore) for value in values)
    return FinishedTrajectory(read_chunk(final), from_blob(reward, RewardScore), read)
