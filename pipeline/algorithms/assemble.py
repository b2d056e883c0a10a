"""Joins the chunks of one trajectory into one sequence, with the policy version that sampled each
token.

The ledger's invariants are checked here, because data that breaks one would be trained on silently.
Numpy only.

Several versions may sample one trajectory. It is still a sample of one well-defined behaviour
policy as long as each token keeps its own log-prob (2505.24298, proposition 1)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from pipeline.ledger.types import ScoredChunk
from protocol.errors import HeadraceError, LedgerError
from protocol.trajectory import Field, GuidanceScore, ReferenceScore, RewardScore, Segment, ValueScore


class NonFiniteUnit(HeadraceError, ValueError):
    """A unit contains NaN or infinity; the learner drops it and goes on."""

    def __init__(self, unit: str, what: str) -> None:
        super().__init__(
            f"unit {unit} has NaN or infinity in {what}; it must not be trained on: drop it with reason "
            "non_finite, and look at the engine or verifier that wrote it"
        )
        self.unit = unit


def join_segments(parts: Iterable[tuple[Sequence[Segment], np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """Join the (segments, log-probs) of consecutive chunks into int32 versions [tokens] and
    log-probs [tokens]. Raises ValueError if there are no tokens, or if segments and log-probs
    differ in length."""
    versions: list[np.ndarray] = []
    logprobs: list[np.ndarray] = []
    for index, (segments, values) in enumerate(parts):
        named = np.array([segment.policy_version for segment in segments], dtype=np.int32)
        expanded = np.repeat(named, [segment.num_tokens for segment in segments])
        if expanded.shape != values.shape:
            raise ValueError(
                f"part {index} has segments for {expanded.size} tokens and behavior_logprobs of shape {values.shape}; expected "
                "one log-prob per token"
            )
        versions.append(expanded)
        logprobs.append(values)
    if not sum(part.size for part in versions):
        raise ValueError(
            "a response has 0 tokens; expected at least 1: a finished trajectory ends with a sampled token"
        )
    return np.concatenate(versions), np.concatenate(logprobs)


@dataclass(frozen=True, slots=True)
class AssembledTrajectory:
    """A finished trajectory. R is the number of response tokens."""

    name: str
    tokens: np.ndarray
    """int32 [prompt + R]"""
    prompt_length: int
    behavior_logprobs: np.ndarray
    """float32 [R]"""
    versions: np.ndarray
    """int32 [R]"""
    reference_logprobs: np.ndarray | None
    """float32 [R]; None unless every chunk has them."""
    values: np.ndarray | None
    """float32 [R], value of the state before each token; None unless every chunk has them."""
    score: RewardScore
    guidance: GuidanceScore | None = None
    """For the whole response; None unless its final chunk has it."""


def has_verdict(chunks: Sequence[ScoredChunk]) -> bool:
    """Return whether a trajectory has its reward. A finished one without a verdict is a dead
    letter, and its group is trained without it."""
    return not (chunks and chunks[-1].chunk.finish_reason.is_final and Field.REWARD not in chunks[-1].scores)


def assemble(unit: str, chunks: Sequence[ScoredChunk]) -> AssembledTrajectory:
    """Join all chunks of a finished trajectory, given in order; ``unit`` is named in errors.

    Raises NonFiniteUnit for NaN or infinity in log-probs, values, reward or accuracy. Raises
    LedgerError when a chunk or the reward is missing, the last chunk is not final, or chunks
    disagree."""
    if not chunks:
        raise LedgerError(
            f"unit {unit} has a trajectory without chunks; expected at least 1: run `headrace ledger audit`"
        )
    last = chunks[-1].chunk
    name = str(last.trajectory)
    indices = [scored.chunk.id.index for scored in chunks]
    if indices != list(range(len(chunks))) or {scored.chunk.trajectory for scored in chunks} != {last.trajectory}:
        raise LedgerError(
            f"unit {unit}: trajectory {name} consists of chunks {[str(scored.chunk.id) for scored in chunks]}; expected every "
            "chunk of one trajectory, from index 0: run `headrace ledger audit`"
        )
    if not last.finish_reason.is_final:
        raise LedgerError(
            f"unit {unit}: trajectory {name} ends with finish_reason {last.finish_reason}; expected stop or length: an "
            "unfinished trajectory cannot be trained on as a whole"
        )
    response = np.concatenate([last.context_tokens, last.tokens])
    _check_tokens(unit, name, chunks, response)
    score = chunks[-1].scores.get(Field.REWARD)
    if not isinstance(score, RewardScore):
        raise LedgerError(f"unit {unit}: trajectory {name} has no reward; expected one on its final chunk")
    parts = ((scored.chunk.segments, scored.chunk.behavior_logprobs) for scored in chunks)
    try:
        versions, behavior_logprobs = join_segments(parts)
    except ValueError as error:
        raise LedgerError(f"unit {unit}: trajectory {name} is inconsistent: {error}") from error
    reference = _join(unit, chunks, Field.REFERENCE)
    state_values = _join(unit, chunks, Field.VALUE)
    guidance = guidance_of(unit, chunks[-1])
    for what, values in (
        ("behavior_logprobs", behavior_logprobs),
        ("reference_logprobs", reference),
        ("values", state_values),
        ("reward and accuracy", np.array([score.reward, score.accuracy])),
    ):
        if values is not None and not np.isfinite(values).all():
            raise NonFiniteUnit(unit, f"{what} of trajectory {name}")
    return AssembledTrajectory(
        name=name,
        tokens=np.concatenate([last.prompt.tokens, response]).astype(np.int32, copy=False),
        prompt_length=int(last.prompt.tokens.size),
        behavior_logprobs=behavior_logprobs.astype(np.float32, copy=False),
        versions=versions,
        reference_logprobs=reference,
        values=state_values,
        score=score,
        guidance=guidance,
    )


def _check_tokens(unit: str, name: str, chunks: Sequence[ScoredChunk], response: np.ndarray) -> None:
    start = 0
    for scored in chunks:
        chunk = scored.chunk
        end = start + chunk.num_tokens
        if chunk.context_tokens.size != start or not np.array_equal(response[start:end], chunk.tokens):
            raise LedgerError(
                f"unit {unit}: chunk {chunk.id} holds {chunk.num_tokens} tokens after a context of "
                f"{chunk.context_tokens.size}, but the last chunk of {name} has different tokens at {start}..{end}; expected "
                "the same: two generators extended one trajectory"
            )
        start = end
    if start != response.size:
        raise LedgerError(
            f"unit {unit}: the chunks of {name} hold {start} response tokens; expected {response.size}, as in its last chunk"
        )


def token_scores(unit: str, scored: ScoredChunk, field: Field) -> np.ndarray | None:
    """Return a chunk's reference log-probs or values, float32 [tokens], or None if it has none.
    Raises LedgerError unless there is one entry per token."""
    match scored.scores.get(field):
        case ReferenceScore(logprobs=found) | ValueScore(values=found):
            pass
        case _:
            return None
    if found.shape != scored.chunk.tokens.shape:
        raise LedgerError(
            f"unit {unit}: chunk {scored.chunk.id} has {field.value} scores of shape {found.shape}; expected "
            f"{scored.chunk.tokens.shape}, one per token"
        )
    return found.astype(np.float32, copy=False)


def guidance_of(unit: str, scored: ScoredChunk) -> GuidanceScore | None:
    """Return the guidance of the response that ends with this chunk, or None if it has none. Its
    arrays are float32 [response tokens], or empty.

    Raises NonFiniteUnit; raises LedgerError unless there is one entry per response token."""
    match scored.scores.get(Field.GUIDANCE):
        case GuidanceScore() as found:
            pass
        case _:
            return None
    wanted = scored.chunk.response_length
    for what, logprobs in (("standard", found.standard_logprobs), ("judge", found.judge_logprobs)):
        if logprobs.size not in (0, wanted):
            raise LedgerError(
                f"unit {unit}: chunk {scored.chunk.id} has {logprobs.size} {what} log-probs; expected {wanted}, one "
                f"per token of the whole response, or none"
            )
        if not np.isfinite(logprobs).all():
            raise NonFiniteUnit(unit, f"{what} log-probs of trajectory {scored.chunk.trajectory}")
    return found


def _join(unit: str, chunks: Sequence[ScoredChunk], field: Field) -> np.ndarray | None:
    """Concatenate a field's arrays, or return None if a chunk has none."""
    parts: list[np.ndarray] = []
    for scored in chunks:
        part = token_scores(unit, scored, field)
        if part is None:
            return None
        parts.append(part)
    return np.concatenate(parts)
