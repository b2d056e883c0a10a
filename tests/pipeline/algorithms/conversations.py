"""Random trajectories with an environment, as chunks and as plain records of what was sampled in which state."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
import numpy as np

from pipeline.algorithms.batching import TrainingSample
from pipeline.ledger.types import ClaimedUnit, ScoredChunk
from protocol.ids import ChunkId, TrajectoryId
from protocol.trajectory import (
    Field,
    FinishReason,
    GivenSpan,
    Prompt,
    ReferenceScore,
    RewardScore,
    Score,
    Segment,
    TrajectoryChunk,
    Turn,
    TurnRequest,
    ValueScore,
)

PLACEHOLDER = Prompt(prompt_id="train:1", tokens=np.array([1], np.int32), text="", answer="5", verifier="arithmetic")
NOTHING = np.empty(0, np.int32)


@dataclass(frozen=True)
class SampledToken:
    state: tuple[int, ...]
    """Everything that the policy had read: prompt, earlier turns, the environment's tokens."""
    token: int
    behavior: float
    reference: float
    value: float


@dataclass
class Conversation:
    group: int
    member: int
    score: RewardScore
    prompt: tuple[int, ...]
    chunks: list[ScoredChunk] = field(default_factory=list)
    windows: list[list[SampledToken]] = field(default_factory=list)
    """What was sampled, by chunk, without the opening."""
    earlier: list[int] = field(default_factory=list)
    """For each window, the number of tokens sampled before it since the context was last replaced."""

    @property
    def name(self) -> str:
        return f"t.{self.group}.{self.member}"

    @property
    def tokens(self) -> list[SampledToken]:
        return [token for window in self.windows for token in window]

    @property
    def body(self) -> list[ScoredChunk]:
        return self.chunks[1:]


def converse(
    draw: np.random.Generator,
    group: int,
    member: int,
    score: RewardScore,
    *,
    num_turns: int,
    replaces: float = 0.3,
    longest: int = 5,
) -> Conversation:
    """Draw a conversation of ``num_turns`` turns of the model, each of one or two windows; the environment's
    answers replace the context with probability ``replaces``."""

    def some(at_least: int = 1) -> list[int]:
        return draw.integers(2, 60, int(draw.integers(at_least, longest + 1))).tolist()

    made = Conversation(group, member, score, tuple(some()))
    name = TrajectoryId("t", group, member)
    opening = TrajectoryChunk(
        id=ChunkId(name, 0),
        prompt=PLACEHOLDER,
        context_tokens=NOTHING,
        tokens=NOTHING,
        behavior_logprobs=np.empty(0, np.float32),
        segments=(Segment(3, 0),),
        finish_reason=FinishReason.TURN,
    )
    made.chunks.append(ScoredChunk(opening, {Field.TURN: Turn(tokens=np.array(made.prompt, np.int32), text="Q: ")}))
    prompt = msgspec.structs.replace(PLACEHOLDER, tokens=np.array(made.prompt, np.int32), text="Q: ")
    context: list[int] = []
    given: list[GivenSpan] = []
    num_earlier = sequence = 0
    for turn in range(num_turns):
        num_windows = int(draw.integers(1, 3))
        for window in range(num_windows):
            tokens, ends_turn = some(), window == num_windows - 1
            numbers = draw.normal(-1.5, 0.4, (3, len(tokens))).astype(np.float32)
            made.windows.append(
                [
                    SampledToken(
                        (*prompt.tokens.tolist(), *context, *tokens[:place]), token, *map(float, numbers[:, place])
                    )
                    for place, token in enumerate(tokens)
                ]
            )
            made.earlier.append(num_earlier)
            scores: dict[Field, Score] = {
                Field.REFERENCE: ReferenceScore(logprobs=numbers[1]),
                Field.VALUE: ValueScore(values=numbers[2], value_version=turn),
            }
            chunk = TrajectoryChunk(
                id=ChunkId(name, len(made.chunks)),
                prompt=prompt,
                context_tokens=np.array(context, np.int32),
                tokens=np.array(tokens, np.int32),
                behavior_logprobs=numbers[0],
                segments=(Segment(3 + len(made.chunks), len(tokens)),),
                finish_reason=FinishReason.TURN if ends_turn else FinishReason.WINDOW,
                response_text=f"said {turn}. " if ends_turn else None,
                given=tuple(given) or msgspec.UNSET,
                asked=TurnRequest(sequence=sequence),
            )
            made.chunks.append(ScoredChunk(chunk, scores))
            context += tokens
            num_earlier += len(tokens)
        scores = made.chunks[-1].scores
        if turn == num_turns - 1:
            scores |= {Field.TURN: Turn(tokens=NOTHING, is_done=True), Field.REWARD: score}
            continue
        answer = some()
        is_replaced = bool(draw.random() < replaces)
        if is_replaced:
            prompt = msgspec.structs.replace(prompt, tokens=np.array(answer, np.int32))
            context, given, num_earlier = [], [], 0
            sequence += 1
        else:
            given = [*given, GivenSpan(len(context), len(answer))]
            context = context + answer
        answered = Turn(tokens=np.array(answer, np.int32), text=f"told {turn}. ", replaces=is_replaced)
        scores[Field.TURN] = answered
    return made


def conversations(seed: int, *, num_groups: int = 2, group_size: int = 3, replaces: float = 0.3) -> list[Conversation]:
    """Draw groups of which the first member is right, the last one wrong, and one may be masked as over-long."""
    draw = np.random.default_rng(seed)
    found: list[Conversation] = []
    for group in range(num_groups):
        for member in range(group_size):
            right = member == 0 or (member < group_size - 1 and draw.random() < 0.5)
            is_masked = not right and member < group_size - 1 and draw.random() < 0.5
            score = RewardScore(reward=(1.0 if right else -1.0) + 0.1 * member, accuracy=float(right), masked=is_masked)
            num_turns = int(draw.integers(1, 5))
            found.append(converse(draw, group, member, score, num_turns=num_turns, replaces=replaces))
    return found


def group_units(drawn: list[Conversation]) -> list[ClaimedUnit]:
    groups = sorted({one.group for one in drawn})
    return [ClaimedUnit(str(g), tuple(tuple(one.chunks) for one in drawn if one.group == g)) for g in groups]


def trajectory_units(drawn: list[Conversation]) -> list[ClaimedUnit]:
    return [ClaimedUnit(one.name, (tuple(one.chunks),)) for one in drawn]


def chunk_units(drawn: list[Conversation]) -> list[ClaimedUnit]:
    return [ClaimedUnit(str(scored.chunk.id), ((scored,),)) for one in drawn for scored in one.chunks]


def sample_at(places: np.ndarray, tokens: np.ndarray, prompt_length: int) -> TrainingSample:
    """Make a sample of which the tokens at ``places`` were sampled."""
    number = places.size
    return TrainingSample(
        name="t.0.0",
        tokens=tokens.astype(np.int32),
        prompt_length=prompt_length,
        loss_mask=np.ones(number, np.bool_),
        advantages=np.ones(number, np.float32),
        behavior_logprobs=np.zeros(number, np.float32),
        versions=np.zeros(number, np.int32),
        places=places,
    )
