"""Joins the chunks of one trajectory, with the policy version that sampled each token.

Between the chunks may be an environment's tokens. They are state for the tokens after them and
nothing else: every array here and in training has one entry per *sampled* token, so that no length,
advantage or loss counts any other. A trajectory is one sequence, unless an environment's turn
replaced the context before it: then each context and what was sampled after it is a sequence of its
own.

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
from protocol.trajectory import (
    Field,
    FinishReason,
    GivenSpan,
    GuidanceScore,
    ReferenceScore,
    RewardScore,
    Segment,
    TrajectoryChunk,
    Turn,
    ValueScore,
)


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
class SampledSequence:
    """A prompt and what followed, up to the last sampled token, as the policy read it."""

    tokens: np.ndarray
    """int32"""
    prompt_length: int
    """Tokens before the first sampled one."""
    places: np.ndarray | None = None
    """int64: indices of the sampled tokens; None if all after the prompt were sampled."""

    @classmethod
    def of(cls, chunk: TrajectoryChunk) -> SampledSequence:
        """Return the sequence that ends with this chunk."""
        tokens = np.concatenate([chunk.prompt.tokens, chunk.context_tokens, chunk.tokens]).astype(np.int32, copy=False)
        prompt_length = int(chunk.prompt.tokens.size)
        if not chunk.given_spans:
            return cls(tokens, prompt_length)
        is_sampled = np.arange(tokens.size) >= prompt_length
        for span in chunk.given_spans:
            begin = prompt_length + span.start
            is_sampled[begin : begin + span.num_tokens] = False
        return cls(tokens, *_from_places(np.flatnonzero(is_sampled), tokens.size))

    @property
    def num_sampled(self) -> int:
        return int(self.tokens.size - self.prompt_length if self.places is None else self.places.size)


def _from_places(places: np.ndarray, size: int) -> tuple[int, np.ndarray | None]:
    first = int(places[0])
    return first, places if places.size < size - first else None


@dataclass(frozen=True, slots=True)
class AssembledTrajectory:
    """A finished trajectory. R is the number of its sampled tokens."""

    name: str
    sequences: tuple[SampledSequence, ...]
    """In order; together they have all R tokens."""
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
    letter, as is one whose environment never answered; its group is trained without it."""
    if not chunks or Field.REWARD in chunks[-1].scores:
        return True
    reason = chunks[-1].chunk.finish_reason
    return not (reason.is_final or reason is FinishReason.TURN)


def turn_of(scored: ScoredChunk) -> Turn | None:
    """Return the environment's answer to a chunk."""
    found = scored.scores.get(Field.TURN)
    return found if isinstance(found, Turn) else None


def is_ended(scored: ScoredChunk) -> bool:
    """Return whether a trajectory ends with this chunk: by itself, or because its environment says so."""
    turn = turn_of(scored)
    return scored.chunk.finish_reason.is_final or (turn is not None and turn.is_done)


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
    if not is_ended(chunks[-1]):
        raise LedgerError(
            f"unit {unit}: trajectory {name} ends with finish_reason {last.finish_reason}; expected stop or length, or a turn "
            "that ends it: an unfinished trajectory cannot be trained on as a whole"
        )
    if chunks[0].chunk.is_opening:
        chunks = _after_opening(unit, name, chunks)
    sequences = _sequences(unit, name, chunks)
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
        sequences=sequences,
        behavior_logprobs=behavior_logprobs.astype(np.float32, copy=False),
        versions=versions,
        reference_logprobs=reference,
        values=state_values,
        score=score,
        guidance=guidance,
    )


def _after_opening(unit: str, name: str, chunks: Sequence[ScoredChunk]) -> Sequence[ScoredChunk]:
    turn = turn_of(chunks[0])
    if turn is None or len(chunks) < 2 or not np.array_equal(turn.tokens, chunks[1].chunk.prompt.tokens):
        raise LedgerError(
            f"unit {unit}: trajectory {name} does not begin with the prompt that its environment gave; expected chunk 0 to "
            "have a turn with the tokens of chunk 1's prompt: run `headrace ledger audit`"
        )
    return chunks[1:]


def _sequences(unit: str, name: str, chunks: Sequence[ScoredChunk]) -> tuple[SampledSequence, ...]:
    """Split chunks where an environment replaced the context, and check that each chunk continues the one before."""
    found: list[SampledSequence] = []
    parts: list[ScoredChunk] = []
    begin = None
    for scored in chunks:
        parts.append(scored)
        turn = turn_of(scored)
        if scored is chunks[-1] or (turn is not None and turn.replaces):
            if begin is not None and not np.array_equal(begin.tokens, parts[0].chunk.prompt.tokens):
                raise LedgerError(
                    f"unit {unit}: chunk {parts[0].chunk.id} does not begin with the context that the environment gave; "
                    "expected the turn's tokens as its prompt: run `headrace ledger audit`"
                )
            _check_tokens(unit, name, parts)
            found.append(SampledSequence.of(scored.chunk))
            parts, begin = [], turn
    return tuple(found)


def _check_tokens(unit: str, name: str, chunks: Sequence[ScoredChunk]) -> None:
    """Check that the last chunk has every token of a sequence: those of the chunks, and of the turns between them."""
    last = chunks[-1].chunk
    whole = np.concatenate([last.context_tokens, last.tokens])
    given: list[GivenSpan] = []
    start = 0

    def skip(turn: Turn) -> None:
        nonlocal start
        end = start + turn.tokens.size
        if not np.array_equal(whole[start:end], turn.tokens):
            raise LedgerError(
                f"unit {unit}: the environment's turn at {start}..{end} of {name} has other tokens than the last chunk there; "
                "expected the same: two generators extended one trajectory"
            )
        given.append(GivenSpan(start, int(turn.tokens.size)))
        start = end

    for scored in chunks:
        chunk = scored.chunk
        end = start + chunk.num_tokens
        if chunk.context_tokens.size != start or not np.array_equal(whole[start:end], chunk.tokens):
            raise LedgerError(
                f"unit {unit}: chunk {chunk.id} holds {chunk.num_tokens} tokens after a context of "
                f"{chunk.context_tokens.size}, but the last chunk of {name} has different tokens at {start}..{end}; expected "
                "the same: two generators extended one trajectory"
            )
        if chunk.given_spans != tuple(given):
            raise LedgerError(
                f"unit {unit}: chunk {chunk.id} says that the environment gave {chunk.given_spans}; expected {tuple(given)}, "
                "as its turns say"
            )
        start = end
        turn = turn_of(scored)
        if scored is not chunks[-1] and turn is not None:
            skip(turn)


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
