"""Data types of the data path: generators' chunks and what scorers add to them.

A prompt with everything sampled after it is a *trajectory*. It is cut into *chunks*, each at most one window
long, which are sent and stored as soon as they are sampled. Within a chunk, a run of tokens sampled by one
policy version is a *segment*."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import msgspec
import numpy as np

from protocol.arrays import Float32Vector, Int32Vector
from protocol.ids import ChunkId, TrajectoryId


class FinishReason(StrEnum):
    """Why a chunk ends."""

    STOP = "stop"
    """A stop token was sampled or a stop string completed; the trajectory is finished."""
    LENGTH = "length"
    """The response reached its limit; the trajectory is finished."""
    WINDOW = "window"
    """The window is full or the generator is draining; the trajectory continues in the next chunk."""
    TURN = "turn"
    """The model ended its turn, or has no room to go on: the environment answers, and says whether the
    trajectory continues. Only in trajectories with an environment, all of whose turns end so."""
    ABORT = "abort"
    """The engine gave up the trajectory; another generator continues it. Never scored."""

    @property
    def is_final(self) -> bool:
        """Whether the trajectory has ended and can be scored. After TURN the environment decides."""
        return self in (FinishReason.STOP, FinishReason.LENGTH)


class Field(StrEnum):
    """What a scorer adds to a chunk. Each field is written once; a repeat changes nothing."""

    REWARD = "reward"
    REFERENCE = "reference"
    VALUE = "value"
    GUIDANCE = "guidance"
    """Only on final chunks of training, after their reward, which has the texts for it."""
    TURN = "turn"
    """The environment's answer; only on chunks that end a turn."""


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """A tokenised line of a prompt file.

    Example: ``Prompt(prompt_id="train:17", tokens=array([5, 9]), text="2+3=", answer="5",
    verifier="arithmetic")``."""

    prompt_id: str
    """Source and line, stable over a run, such as ``train:17``."""
    tokens: Int32Vector = msgspec.field(name="tokens:<i4")
    """int32 [prompt tokens]"""
    text: str
    answer: str
    verifier: str
    """Name in the verifier registry, or a configured ``package.module:function``."""
    extra: dict[str, Any] = {}
    """All further columns of the data file, passed to the verifier unchanged."""


class Segment(msgspec.Struct, frozen=True):
    """A run of consecutive response tokens sampled by one policy version."""

    policy_version: int
    num_tokens: int


class TurnRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What an environment asks of the model's next turn; it travels with the turn's chunks."""

    state: bytes = b""
    """The environment's own, opaque to everyone else; it comes back with the turn."""
    sequence: int = 0
    """Number of the sequence within its trajectory; each has a random stream of its own."""
    max_tokens: int = 0
    """Most tokens of the turn; 0 for no limit but the context's."""
    stop_strings: tuple[str, ...] = ()
    """The turn ends with the first token after which its text contains one of them."""
    whole: bool = False
    """The turn is one window, unless a drain cuts it, so that one chunk has all its log-probs."""


class Turn(msgspec.Struct, frozen=True, kw_only=True, tag="turn", omit_defaults=True):
    """An environment's answer to the model's turn, or to the start of a trajectory."""

    tokens: Int32Vector = msgspec.field(name="tokens:<i4")
    """int32 [tokens], up to where the model's next turn begins; empty if the trajectory has ended. They follow
    the chunk's tokens. The answer to a trajectory's opening chunk has its prompt."""
    text: str = ""
    """What the tokens say."""
    asks: TurnRequest | msgspec.UnsetType = msgspec.UNSET
    """Left out if the trajectory has ended."""
    replaces: bool = False
    """``tokens`` take the place of the whole context: they are the prompt of a new sequence, in which nothing before
    it is trained on. The chat template renders earlier turns in another way now, or another conversation begins."""
    is_done: bool = False
    """The trajectory has ended; the reward worker scores it."""
    is_truncated: bool = False
    """It was ended by a limit: context, turns or time."""
    reward: float = 0.0
    """Of the whole trajectory up to here."""
    accuracy: float | None = None
    """Raw correctness in [0, 1] of the whole trajectory. None at its end leaves it to the prompt's verifier, which
    judges the last turn; one that was truncated is then wrong."""
    counts: dict[str, int] = {}
    """What happened in this turn, to be counted, such as ``{"calls_ok": 1}``."""


class GivenSpan(msgspec.Struct, frozen=True):
    """Consecutive context tokens that the policy did not sample in this sequence."""

    start: int
    """Index of its first token in ``context_tokens``."""
    num_tokens: int


class TrajectoryChunk(msgspec.Struct, frozen=True, kw_only=True, tag="chunk"):
    """At most one window of a trajectory, with its whole context, since scorers keep no state."""

    id: ChunkId
    prompt: Prompt
    """The context starts with ``prompt.tokens``."""
    context_tokens: Int32Vector = msgspec.field(name="context_tokens:<i4")
    """int32 [earlier response tokens]: those of the previous chunks and of the environment's turns between them,
    without the prompt."""
    tokens: Int32Vector = msgspec.field(name="tokens:<i4")
    """int32 [tokens of this chunk], including the stop token, or everything that completes a stop string."""
    behavior_logprobs: Float32Vector = msgspec.field(name="behavior_logprobs:<f4")
    """float32 [tokens of this chunk]: log-probability under the distribution sampled from."""
    segments: tuple[Segment, ...]
    """Segments in order; their lengths sum to ``tokens.size``."""
    finish_reason: FinishReason
    response_text: str | None = None
    """The whole response decoded without special tokens, up to the end of its stop string, on final chunks; the
    turn's text on chunks that end one."""
    worker: str = ""
    """Incarnation that sampled it, for people, such as ``generator-0#3``."""
    created_s: float = 0.0
    """Wall-clock time when the chunk was cut, seconds since 1970."""
    raw_text: str | msgspec.UnsetType = msgspec.UNSET
    """The response with its special tokens, without the final end token; left out of the bytes when it equals
    ``response_text``."""
    given: tuple[GivenSpan, ...] | msgspec.UnsetType = msgspec.UNSET
    """The environment's tokens in ``context_tokens``, in order and apart: state without loss. Left out of the
    bytes if there are none."""
    asked: TurnRequest | msgspec.UnsetType = msgspec.UNSET
    """``Turn.asks`` of the environment's turn before this one; left out when there was none."""
    turn: Turn | msgspec.UnsetType = msgspec.UNSET
    """The environment's last word, in a chunk that it sends to the reward worker; never in the ledger's chunk."""

    @property
    def is_opening(self) -> bool:
        """Whether it only asks the environment to begin the trajectory: chunk 0, without tokens."""
        return self.finish_reason is FinishReason.TURN and not self.tokens.size

    @property
    def given_spans(self) -> tuple[GivenSpan, ...]:
        return () if isinstance(self.given, msgspec.UnsetType) else self.given

    @property
    def written_text(self) -> str | None:
        """The whole response as written, including special tokens; only on final chunks."""
        return self.response_text if isinstance(self.raw_text, msgspec.UnsetType) else self.raw_text

    @property
    def trajectory(self) -> TrajectoryId:
        return self.id.trajectory

    @property
    def num_tokens(self) -> int:
        return int(self.tokens.size)

    @property
    def response_length(self) -> int:
        """Response tokens up to and including this chunk, the environment's too."""
        return int(self.context_tokens.size + self.tokens.size)

    @property
    def turn_start(self) -> int:
        """Index of the first token of the model's turn, in ``context_tokens`` followed by ``tokens``."""
        return max((span.start + span.num_tokens for span in self.given_spans), default=0)

    @property
    def num_sampled(self) -> int:
        """Response tokens up to and including this chunk that the policy sampled in this sequence."""
        return self.response_length - sum(span.num_tokens for span in self.given_spans)

    def context_after(self, turn: Turn | None) -> tuple[Int32Vector, tuple[GivenSpan, ...]]:
        """Return the next chunk's ``context_tokens`` and ``given`` after the environment's ``turn``, if one came. Both are
        empty after an opening, and after a turn that replaces the context: the turn is the prompt."""
        if self.is_opening or (turn is not None and turn.replaces):
            return self.tokens[:0], ()
        tokens = np.concatenate([self.context_tokens, self.tokens])
        if turn is None:
            return tokens, self.given_spans
        return np.concatenate([tokens, turn.tokens]), (*self.given_spans, GivenSpan(tokens.size, turn.tokens.size))

    @property
    def versions(self) -> tuple[int, ...]:
        """The policy versions of this chunk's tokens, ascending, each once."""
        return tuple(sorted({s.policy_version for s in self.segments}))

    @property
    def oldest_version(self) -> int:
        return min(s.policy_version for s in self.segments)

    @property
    def newest_version(self) -> int:
        return max(s.policy_version for s in self.segments)


class Guidance(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Texts about one response: what is right, and what is wrong with it.

    Example: ``Guidance(gold_text="13", judge_text="step 3 says 14, should be 13")``."""

    gold_text: str = ""
    """The answer, or the worked solution if the data has one."""
    judge_text: str = ""
    """The judgment: what is wrong, quoting the wrong step. Empty for a right response."""
    absent: str = ""
    """Why a wrong response has no judgment."""


class RewardScore(msgspec.Struct, frozen=True, kw_only=True, tag="reward"):
    """What the reward worker adds to the final chunk of a trajectory."""

    reward: float
    """What the learner maximises: correctness plus shaping."""
    accuracy: float
    """Raw correctness in [0, 1], before any shaping; dynamic sampling filters by it."""
    parts: dict[str, float] = {}
    """Named summands of the reward, for metrics, such as ``{"correct": 1.0, "overlong": -0.25}``."""
    masked: bool = False
    """Over-long filtering: the response counts in its group's mean and std, but has no loss."""
    guidance: Guidance | None = None
    """None, and left out of the bytes, in evaluation and in runs without guidance."""


class ReferenceScore(msgspec.Struct, frozen=True, kw_only=True, tag="reference"):
    """What the reference worker adds to a chunk."""

    logprobs: Float32Vector = msgspec.field(name="logprobs:<f4")
    """float32 [tokens of the chunk] under the frozen reference policy."""


class ValueScore(msgspec.Struct, frozen=True, kw_only=True, tag="value"):
    """What the value worker adds to a chunk."""

    values: Float32Vector = msgspec.field(name="values:<f4")
    """float32 [tokens of the chunk]: value of the state before each token."""
    value_version: int
    """Version of the value model that computed them."""


class GuidanceScore(msgspec.Struct, frozen=True, kw_only=True, tag="guidance"):
    """What the reference worker adds to the final chunk of a trajectory, for its whole response.

    Both log-probs are the frozen reference policy's, of the response tokens as they were sampled."""

    standard_logprobs: Float32Vector = msgspec.field(name="standard_logprobs:<f4")
    """float32 [response tokens of the trajectory] after the prompt with the gold text; or empty."""
    judge_logprobs: Float32Vector = msgspec.field(name="judge_logprobs:<f4")
    """float32 [response tokens of the trajectory] after the prompt with the judgment; empty for a right
    response, and without a judgment."""
    guide_version: str
    """Digest of templates, model and tokenizer."""
    absent: str = ""
    """Why log-probs that the response should have are missing."""


Score = RewardScore | ReferenceScore | ValueScore | GuidanceScore | Turn


def field_of(score: Score) -> Field:
    if isinstance(score, RewardScore):
        return Field.REWARD
    if isinstance(score, ReferenceScore):
        return Field.REFERENCE
    if isinstance(score, ValueScore):
        return Field.VALUE
    return Field.TURN if isinstance(score, Turn) else Field.GUIDANCE
