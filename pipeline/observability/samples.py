"""Responses for people to read, from updates all over a run: the records of ``samples.jsonl``.

The file is bounded. At twice ``samples.keep_updates`` updates, the newest are kept, and older ones at
even distances. Long texts lose their middle. Only the owner can read the file. A failed write is logged
once and loses those samples; training continues."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec
import numpy as np
import structlog
from msgspec.structs import replace

from pipeline.files.records import RecordFile, Schema
from pipeline.ledger.types import ScoredChunk
from protocol.trajectory import Field, FinishReason, RewardScore, Turn

if TYPE_CHECKING:
    from pipeline.algorithms.batching import TrainingSample
    from pipeline.config.runtime import SamplesSection
    from pipeline.ledger.types import ClaimedUnit, ShownResponse

SAMPLES_NAME = "samples.jsonl"

_T = TypeVar("_T")

_log = structlog.get_logger(__name__)

TRAINED = "trained"
_KINDS: Mapping[str, list[str]] = {TRAINED: [], "evaluation": ["of an evaluation"]}
_CHARS_PER_TOKEN = 4
"""Converts ``samples.max_chars`` to a limit of tokens."""
_DIGITS = 4


class TokenDetail(msgspec.Struct, frozen=True):
    """A response token by token: all of it, or its beginning and end."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Log-probs at sampling."""
    segments: tuple[tuple[int, int], ...]
    """Policy version and number of tokens of each segment, in order."""
    advantages: tuple[float, ...]
    """One per token, or one for all of them; empty for a response without loss."""
    cuts: tuple[tuple[int, int], ...] = ()
    """Pairs of an index and the number of tokens left out before it."""
    turns: tuple[tuple[int, str], ...] = ()
    """The environment's words: pairs of an index and the text before it."""


class ResponseSample(msgspec.Struct, frozen=True):
    """One response of an update."""

    update: int
    policy_version: int
    """Version made by the update; older versions sampled the response."""
    trajectory: str
    prompt: str
    answer: str
    """The right answer, from the data."""
    verifier: str
    response: str
    num_tokens: int
    finish_reason: str
    versions: tuple[int, int]
    """Oldest and newest version that sampled its tokens."""
    reward: float
    accuracy: float
    """Raw correctness, from 0 to 1."""
    parts: dict[str, float] = {}
    """The parts that add up to the reward."""
    masked: bool = False
    """Over-long, and therefore without loss."""
    tokens: TokenDetail | None = None
    """None in samples of older versions, and for responses that were not trained on."""
    kind: str = TRAINED
    """``trained``, ``evaluation``, or the reason why its group was dropped."""

    @property
    def verdict(self) -> str:
        """``right``, ``wrong``, or the accuracy."""
        if self.accuracy in (0.0, 1.0):
            return "right" if self.accuracy else "wrong"
        return f"accuracy {self.accuracy:.2f}"

    @property
    def facts(self) -> str:
        """Reward, length and sampling versions, on one line."""
        parts = ", ".join(f"{name} {value + 0.0:+.2f}" for name, value in self.parts.items())
        first, last = self.versions
        words = [
            *_KINDS.get(self.kind, [f"dropped: {self.kind}"]),
            f"reward {self.reward:+.2f}" + (f" ({parts})" if len(self.parts) > 1 else ""),
            f"{self.num_tokens:,} tokens",
            "cut at the limit" if self.finish_reason == FinishReason.LENGTH else "ended by itself",
            *(["masked as over-long"] if self.masked else []),
            f"sampled by version {first}" + (f" to {last}" if last > first else ""),
        ]
        return ", ".join(words)


_SCHEMA: Final[Schema[ResponseSample]] = Schema(ResponseSample)


def response_samples(run_dir: Path) -> RecordFile[ResponseSample]:
    return RecordFile(run_dir / SAMPLES_NAME, _SCHEMA)


class Samples:
    """Keeps responses of updates. Blocks."""

    def __init__(self, settings: SamplesSection, run_dir: Path, last_version: int) -> None:
        """Open the file, dropping the samples after ``last_version``, the resumed checkpoint's version."""
        self._settings = settings
        self._file = response_samples(run_dir)
        self._has_failed = False
        self._updates: list[int] = []
        if settings.per_update and self._file.path.exists():
            self._try_to(lambda: self._rewrite(lambda sample: sample.policy_version <= last_version))

    def keep(
        self,
        units: Sequence[ClaimedUnit],
        update: int,
        policy_version: int,
        trained: Sequence[TrainingSample] = (),
        shown: Sequence[ShownResponse] = (),
    ) -> None:
        """Keep some responses of an update, chosen by its number alone.

        ``trained``: training samples of the same units, for their advantages. ``shown``: responses that
        are not trained on; as many are kept of each kind."""
        if not self._settings.per_update:
            return
        kinds = dict.fromkeys(one.kind for one in shown)
        for kind in kinds:
            some = [one for one in shown if one.kind == kind][: self._settings.per_update]
            self._append([_shown(one, update, policy_version, self._settings.max_chars) for one in some])
        found = _choose(_finished(units, update), self._settings.per_update)
        if found:
            most = self._settings.max_chars
            by_name: dict[str, list[TrainingSample]] = {}
            for sample in trained:
                by_name.setdefault(sample.name, []).append(sample)
            kept = [
                replace(_sample(chunks, update, policy_version, most), tokens=_tokens(chunks, by_name, most))
                for chunks in found
            ]
            self._append(kept)

    def _append(self, samples: list[ResponseSample]) -> None:
        self._try_to(lambda: self._append_bounded(samples))

    def _append_bounded(self, samples: list[ResponseSample]) -> None:
        if len(self._updates) + 1 >= 2 * self._settings.keep_updates:
            kept = kept_updates(self._updates, self._settings.keep_updates)
            self._rewrite(lambda sample: sample.update in kept)
        self._file.append(*samples)
        if samples[0].update not in self._updates[-1:]:
            self._updates.append(samples[0].update)

    def _rewrite(self, keeps: Callable[[ResponseSample], bool]) -> None:
        kept = list(filter(keeps, self._file.read()[0]))
        self._file.rewrite(kept)
        self._updates = sorted({sample.update for sample in kept})

    def _try_to(self, write: Callable[[], None]) -> None:
        try:
            write()
            self._has_failed = False
        except OSError as error:
            if not self._has_failed:
                _log.warning("samples_not_written", reason=str(error), action="make room; training goes on")
            self._has_failed = True


def kept_updates(updates: Sequence[int], number: int) -> set[int]:
    """Return about ``number`` of the ascending ``updates``: the first, the newest half, and a half spread
    evenly. The latter are multiples of a power of two, so that what was once dropped stays dropped."""
    half = max(1, number // 2)
    stride = 1
    while updates[-1] // stride > half:
        stride *= 2
    return {updates[0], *(update for update in updates if update % stride == 0), *updates[-half:]}


def spread(samples: Sequence[ResponseSample], num_updates: int) -> list[ResponseSample]:
    """Return the samples of up to ``num_updates`` updates: first, last, and evenly spaced between."""
    updates = sorted({sample.update for sample in samples})
    kept = set(_evenly(updates, num_updates))
    return [sample for sample in samples if sample.update in kept]


def _finished(units: Sequence[ClaimedUnit], update: int) -> Iterator[tuple[ScoredChunk, ...]]:
    """Yield finished responses unit by unit, starting at a unit chosen by the update's number."""
    # A prime, so that the unit varies with the update.
    start = update * 7919 % max(1, len(units))
    for unit in (*units[start:], *units[:start]):
        found = [chunks for chunks in unit.trajectories if chunks and Field.REWARD in chunks[-1].scores]
        yield from sorted(found, key=lambda chunks: _score(chunks).reward)


def _choose(found: Iterable[tuple[ScoredChunk, ...]], number: int) -> list[tuple[ScoredChunk, ...]]:
    """Return ``number`` responses of the first groups: worst, best, and evenly spaced between."""
    first: list[tuple[ScoredChunk, ...]] = []
    group = None
    for chunks in found:
        if len(first) >= number and chunks[-1].chunk.trajectory.group != group:
            break
        group = chunks[-1].chunk.trajectory.group
        first.append(chunks)
    return _evenly(first, number)


def _evenly(items: Sequence[_T], number: int) -> list[_T]:
    if len(items) <= number:
        return list(items)
    if number == 1:
        return [items[-1]]
    return [items[round(place * (len(items) - 1) / (number - 1))] for place in range(number)]


def _score(chunks: tuple[ScoredChunk, ...]) -> RewardScore:
    score = chunks[-1].scores[Field.REWARD]
    assert isinstance(score, RewardScore)
    return score


def _turn(scored: ScoredChunk) -> Turn | None:
    found = scored.scores.get(Field.TURN)
    return found if isinstance(found, Turn) else None


def _num_earlier(chunks: tuple[ScoredChunk, ...]) -> int:
    """Return the number of sampled tokens before these chunks of a trajectory."""
    return chunks[0].chunk.num_sampled - chunks[0].chunk.num_tokens


def _text(chunks: tuple[ScoredChunk, ...]) -> str:
    """Return the response as written, with the environment's words between the model's turns."""
    words: list[str] = []
    for scored in chunks:
        turn = None if scored.chunk.is_opening else _turn(scored)
        words += [scored.chunk.written_text or "", turn.text if turn else ""]
    return "".join(words)


def _finish_reason(last: ScoredChunk) -> FinishReason:
    turn = _turn(last)
    if turn is None:
        return last.chunk.finish_reason
    return FinishReason.LENGTH if turn.is_truncated else FinishReason.STOP


def _sample(chunks: tuple[ScoredChunk, ...], update: int, policy_version: int, most: int) -> ResponseSample:
    last, score = chunks[-1].chunk, _score(chunks)
    sampled = [scored.chunk for scored in chunks if not scored.chunk.is_opening]
    return ResponseSample(
        update=update,
        policy_version=policy_version,
        trajectory=str(last.trajectory),
        prompt=_cut(last.prompt.text, most),
        answer=_cut(last.prompt.answer, most),
        verifier=last.prompt.verifier,
        response=_cut(_text(chunks), most),
        num_tokens=_num_earlier(chunks) + sum(chunk.num_tokens for chunk in sampled),
        finish_reason=str(_finish_reason(chunks[-1])),
        versions=(min(c.oldest_version for c in sampled), max(c.newest_version for c in sampled)),
        reward=score.reward,
        accuracy=score.accuracy,
        parts=dict(score.parts),
        masked=score.masked,
    )


def _shown(one: ShownResponse, update: int, policy_version: int, most: int) -> ResponseSample:
    scored = ScoredChunk(one.chunk, {Field.REWARD: one.reward})
    return replace(_sample((scored,), update, policy_version, most), kind=one.kind)


def _tokens(
    chunks: tuple[ScoredChunk, ...], trained: Mapping[str, Sequence[TrainingSample]], max_chars: int
) -> TokenDetail:
    """Return the tokens of a response; if its windows are units, those of the last one."""
    last = chunks[-1].chunk
    ids = np.concatenate([one.chunk.tokens for one in chunks])
    logprobs = np.concatenate([one.chunk.behavior_logprobs for one in chunks])
    segments = [segment for one in chunks for segment in one.chunk.segments]
    versions = np.repeat([s.policy_version for s in segments], [s.num_tokens for s in segments])
    samples = trained.get(str(last.trajectory), trained.get(str(last.id), ()))
    advantages = np.empty(0)
    if sum(s.advantages.size for s in samples) == ids.size and any(s.loss_mask.any() for s in samples):
        advantages = np.concatenate([np.where(s.loss_mask, s.advantages, 0.0) for s in samples])
        advantages = advantages[:1] if (advantages == advantages[0]).all() else advantages
    before = _num_earlier(chunks)
    most = max(2, max_chars // _CHARS_PER_TOKEN)
    kept = np.arange(ids.size)
    cuts = [(0, before)] if before else []
    if ids.size > most:
        head = most // 3
        kept = np.concatenate([kept[:head], kept[ids.size - (most - head) :]])
        cuts.append((head, int(ids.size) - most))
    ends = np.cumsum([one.chunk.num_tokens for one in chunks]).tolist()
    turns = [
        (end, turn.text) for one, end in zip(chunks, ends, strict=True) if end and (turn := _turn(one)) and turn.text
    ]
    return TokenDetail(
        ids=tuple(map(int, ids[kept])),
        logprobs=_rounded(logprobs[kept]),
        segments=tuple((version, len(list(run))) for version, run in groupby(map(int, versions[kept]))),
        advantages=_rounded(advantages if advantages.size < 2 else advantages[kept]),
        cuts=tuple(cuts),
        turns=tuple((int(np.searchsorted(kept, end)), _cut(words, max_chars)) for end, words in turns if end in kept),
    )


def _rounded(values: np.ndarray) -> tuple[float, ...]:
    return tuple(round(float(value), _DIGITS) for value in values)


def _cut(text: str, most: int) -> str:
    """Shorten ``text`` to ``most`` characters by leaving out the middle."""
    if len(text) <= most:
        return text
    head = most // 3
    return f"{text[:head]}\n[... {len(text) - most:,} characters ...]\n{text[len(text) - (most - head) :]}"
